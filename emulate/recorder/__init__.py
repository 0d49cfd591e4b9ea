"""Record what the points of TensorFlow and Keras show of a run, and describe the run: what is recorded, what is changed."""

from emulate.recorder.host_trace import HostTrace
from emulate.recorder.initial_weights import shard_of
from emulate.recorder.plan import (
    BY_SHARE,
    CENTERED,
    IN_32_BITS,
    SAME_ON_ONE_DEVICE,
    SYNCHRONIZED,
    TAPES_JOINED,
    Follow,
    ProbePlan,
    Replay,
)
from emulate.recorder.queue import Record, collecting, outlet, release
from emulate.recorder.recorder import Recorder
from emulate.recorder.replica_call import Body, current_body, tensors_of, unseen

__all__ = [
    "BY_SHARE",
    "CENTERED",
    "IN_32_BITS",
    "SAME_ON_ONE_DEVICE",
    "SYNCHRONIZED",
    "TAPES_JOINED",
    "Body",
    "Follow",
    "HostTrace",
    "ProbePlan",
    "Record",
    "Recorder",
    "Replay",
    "collecting",
    "current_body",
    "outlet",
    "release",
    "shard_of",
    "tensors_of",
    "unseen",
]
