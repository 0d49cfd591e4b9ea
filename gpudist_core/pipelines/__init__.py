"""Feed examples to replicas: every example exactly once in an epoch, in the same global batches on every topology."""

from gpudist_core.pipelines.distributed import Distributed
from gpudist_core.pipelines.pipeline import Pipeline
from gpudist_core.pipelines.plan import UnknownLength, shares

__all__ = ["Distributed", "Pipeline", "UnknownLength", "shares"]
