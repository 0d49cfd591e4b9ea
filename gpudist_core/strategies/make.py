"""Make the `tf.distribute.Strategy` for where the program runs, on the devices and with the all-reduce that a user names.

TensorFlow does not check the names of devices: an unknown device silently becomes CPU:0.

The last strategy of several replicas is remembered: a model made outside its scope is trained on one device only.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gpudist_core.environments import Tasks, find_tasks, index_of, num_gpus, shares_hardware, show_own_gpus
from gpudist_core.errors import Unavailable, UsageError, is_finite, is_whole
from gpudist_core.strategies.waiting import set_limit, wait_for
from gpudist_core.upstream import runtime as upstream

KINDS = ("auto", "one-device", "mirrored", "central-storage", "multi-worker", "parameter-server")
DEFAULT_TIMEOUT_SECONDS = 600.0


def make_strategy(
    kind: str = "auto",
    *,
    devices: Devices = None,
    all_reduce: str = "auto",
    bytes_per_pack: int | None = None,
    timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
    time_each_collective: bool = False,
    cluster: Any = None,
    variable_partitioner: Callable[..., Any] | None = None,
) -> tf.distribute.Strategy:
    """Make the `tf.distribute.Strategy` for where this program runs.

    - One device: `OneDeviceStrategy`.
    - Several devices of one machine: `MirroredStrategy`.
    - A cluster (`cluster`, TF_CONFIG, or a Slurm step of several tasks): `MultiWorkerMirroredStrategy`, as soon as all
      hosts have started.
    - A cluster with parameter servers: `ParameterServerStrategy` on the chief. On the other tasks the call serves until it is
      stopped.

    One process can have several strategies. In a cluster, every host must make the same strategies in the same order.

    Args:
        kind: `auto`, `one-device`, `mirrored`, `central-storage`, `multi-worker` or `parameter-server`.
        devices: Names or number of this machine's devices. Default: all GPUs, or all CPU devices if there is no GPU. Clusters
            use all devices.
        all_reduce: How replicas are summed: `auto`, `nccl`, `ring`, `one-device` or `hierarchical` (an even number of devices).
            `auto` uses NCCL on GPUs of one machine, reduces to one device on CPUs and on parts of one GPU, and uses a ring
            between hosts. A ring on one machine may fail inside loops of a tf.function.
        bytes_per_pack: Size in bytes of the packs in which a ring, or NCCL between hosts, sums gradients. Default: one pack.
        timeout_seconds: How long to wait for the other hosts before an error, in seconds: at the start, in each step of
            `TrainStep`, and in each step of a `distributed` model's fit, evaluate and predict. None: no limit.
        time_each_collective: Apply the same limit to each collective, also in custom loops. TensorFlow 2.21 starts a thread for
            each collective that sleeps as long as the limit. Use it with short limits, or to find which collective waits.
        cluster: A cluster resolver, a `tf.train.ClusterSpec` or a dictionary in the form of TF_CONFIG. Default: TF_CONFIG, then
            Slurm.
        variable_partitioner: A `tf.distribute.experimental` partitioner that splits variables over the parameter servers.
            Default: variables are not split.

    Returns:
        A `tf.distribute.Strategy`.

    Raises:
        UsageError: If an argument is not valid or does not fit this machine or cluster.
        Unavailable: If another host did not start in time, or for Horovod.

    Example:
        >>> import gpudist_core as gd
        >>> strategy = gd.make_strategy()
        >>> strategy.num_replicas_in_sync
        1
    """
    if kind not in KINDS:
        raise UsageError(f"kind must be one of {', '.join(KINDS)}", kind=kind)
    check_all_reduce(all_reduce)
    if bytes_per_pack is not None and not is_whole(bytes_per_pack, 1):
        raise UsageError("bytes_per_pack must be a positive integer or None", "Leave it out.", bytes_per_pack=bytes_per_pack)
    if timeout_seconds is not None and not (is_finite(timeout_seconds) and timeout_seconds > 0):
        raise UsageError("timeout_seconds must be a positive number or None", "Leave it out.", timeout_seconds=timeout_seconds)
    if not isinstance(time_each_collective, bool):
        raise UsageError(
            "time_each_collective must be True or False", "Leave it out.", time_each_collective=time_each_collective
        )
    tasks = find_tasks(cluster)
    wish = _Wish(kind, devices, all_reduce, bytes_per_pack, timeout_seconds, time_each_collective, variable_partitioner)
    if kind in ("multi-worker", "parameter-server") or (kind == "auto" and tasks and tasks.trains):
        return _remember(_in_cluster(wish, tasks, cluster))
    if tasks and tasks.trains:
        raise UsageError(
            f"In a cluster of {len(tasks.peers) + 1} tasks, all tasks must train one model ({tasks.source})",
            "Leave kind out. For a separate model on each host, unset TF_CONFIG (in Slurm: SLURM_STEP_NUM_TASKS).",
            kind=kind,
        )
    return _remember(_on_one_host(wish))


@dataclass(frozen=True)
class _Wish:
    kind: str
    devices: Devices
    all_reduce: str
    bytes_per_pack: int | None
    timeout_seconds: float | None
    time_each_collective: bool
    variable_partitioner: Any

    @property
    def collective_seconds(self) -> float | None:
        """Return the time limit of each collective in seconds, or None."""
        return self.timeout_seconds if self.time_each_collective else None


def _on_one_host(wish: _Wish) -> Any:
    devices = chosen_devices(wish.devices)
    if wish.bytes_per_pack is not None and wish.all_reduce != "ring":
        raise UsageError(
            "On one machine, bytes_per_pack needs a ring",
            'Leave bytes_per_pack out, or use all_reduce="ring".',
            bytes_per_pack=wish.bytes_per_pack,
            all_reduce=wish.all_reduce,
        )
    if wish.kind == "central-storage":
        return _central_storage(devices, wish.all_reduce)
    if wish.kind == "one-device" or (wish.kind == "auto" and len(devices) == 1):
        if len(devices) > 1 and wish.devices is not None:
            raise UsageError(
                "kind='one-device' needs exactly one device", "Pass one device.", devices=wish.devices, kind=wish.kind
            )
        return tf.distribute.OneDeviceStrategy(f"/{devices[0]}")
    options = between_hosts("ring", wish.bytes_per_pack, wish.collective_seconds)
    first_key = upstream.new_collective_keys()
    operation = on_one_host(wish.all_reduce, devices, options, first_key)
    return tf.distribute.MirroredStrategy([f"/{name}" for name in devices], cross_device_ops=operation)


def _central_storage(devices: tuple[str, ...], all_reduce: str) -> Any:
    if all_reduce not in ("auto", "one-device"):
        raise UsageError(
            "Central storage must sum on the device that holds the variables", "Leave all_reduce out.", all_reduce=all_reduce
        )
    # Without devices TensorFlow (2.21) takes GPUs only, or one CPU, and keeps the variables of a single GPU on it.
    return tf.distribute.experimental.CentralStorageStrategy([f"/{name}" for name in devices], "/CPU:0")


def _in_cluster(wish: _Wish, tasks: Tasks | None, cluster: Any) -> Any:
    if tasks is None:
        raise UsageError(
            "A cluster must come from TF_CONFIG, from a Slurm step or from the argument cluster",
            "Configure the cluster, or leave kind out.",
            kind=wish.kind,
        )
    if wish.devices is not None:
        raise UsageError(
            "The hosts of a cluster must use all their devices",
            "Hide devices with tf.config.set_visible_devices.",
            devices=wish.devices,
        )
    wanted = "parameter-server" if tasks.has_servers else "multi-worker"
    if wish.kind not in ("auto", wanted):
        raise UsageError(
            f"A cluster {'with' if tasks.has_servers else 'without'} ps tasks needs a {wanted} strategy",
            "Leave kind out, or change the cluster.",
            kind=wish.kind,
            jobs=list(tasks.jobs),
        )
    return (_parameter_server if tasks.has_servers else _multi_worker)(wish, tasks, cluster)


def _multi_worker(wish: _Wish, tasks: Tasks, cluster: Any) -> Any:
    options = between_hosts(wish.all_reduce, wish.bytes_per_pack, wish.collective_seconds)
    if upstream.has_collective_server():
        resolver = _resolver(tasks, cluster)
        if not upstream.is_in_cluster(resolver.cluster_spec()):
            raise UsageError(
                "A process can belong to one cluster only",
                "Start another process for the other cluster.",
                cluster={job: list(addresses) for job, addresses in tasks.jobs.items()},
            )
        with upstream.beside_other_strategies():
            strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    else:
        if upstream.is_initialized():
            raise UsageError(
                "A strategy of several hosts must be made before TensorFlow's runtime starts",
                "Call make_strategy() before the first tensor, variable, model or list of logical devices.",
                kind="multi-worker",
            )
        show_own_gpus()
        wait_for(tasks.peers, tasks.address, tasks.leader, wish.timeout_seconds)
        with upstream.keeping_sigterm():
            strategy = tf.distribute.MultiWorkerMirroredStrategy(_resolver(tasks, cluster), options)
    set_limit(strategy, wish.timeout_seconds)
    return strategy


def _parameter_server(wish: _Wish, tasks: Tasks, cluster: Any) -> Any:
    resolver = _resolver(tasks, cluster)
    if tasks.role in ("worker", "ps"):
        server = tf.distribute.Server(resolver.cluster_spec(), tasks.role, tasks.index, protocol="grpc")
        server.join()  # which does not return
    wait_for(tasks.peers, None, None, wish.timeout_seconds)
    return tf.distribute.ParameterServerStrategy(resolver, wish.variable_partitioner)


def _resolver(tasks: Tasks, cluster: Any) -> Any:
    """Return TensorFlow's resolver for TF_CONFIG, or one that counts this host's GPUs."""
    # Without a count of the GPUs TensorFlow trains on the CPU.
    resolvers = tf.distribute.cluster_resolver
    if cluster is None and tasks.source == "TF_CONFIG":
        return resolvers.TFConfigClusterResolver()
    spec = tf.train.ClusterSpec({job: list(addresses) for job, addresses in tasks.jobs.items()})
    gpus = num_gpus()
    return resolvers.SimpleClusterResolver(
        spec, task_type=tasks.role, task_id=tasks.index, rpc_layer="grpc", num_accelerators={"GPU": gpus} if gpus else {}
    )


Devices = int | str | Sequence[Any] | None


def chosen_devices(devices: Devices) -> tuple[str, ...]:
    """Return the devices of this machine that a strategy uses. The call starts TensorFlow's runtime.

    Args:
        devices: None for all GPUs (or all CPUs if there is no GPU), their number, or their names (`GPU:0`, `/gpu:0`) or entries
            of `tf.config` lists.

    Returns:
        Names such as `GPU:0`.

    Raises:
        UsageError: If a device does not exist or is named twice.
    """
    if isinstance(devices, str):
        devices = [devices]
    if devices is None or is_whole(devices):
        kind = "GPU" if _logical("GPU") else "CPU"
        number = len(_logical(kind)) if devices is None else devices
        if number < 1:
            raise UsageError("devices must hold at least one device", "Leave devices out for all.", devices=devices)
        asked = [f"{kind}:{i}" for i in range(number)]
    elif isinstance(devices, Sequence):
        asked = [_short(device) for device in devices]
    else:
        raise UsageError("devices must be a number or a list of names", 'Use devices=2 or devices=["GPU:0"].', devices=devices)
    if not asked or len(set(asked)) < len(asked):
        raise UsageError(
            "devices must hold at least one device, and each device once", "Leave devices out for all.", devices=devices
        )
    # Where one device stands for all (a reference run), several names find the same.
    return tuple(dict.fromkeys(_found(name, devices) for name in asked))


def _logical(kind: str) -> Any:
    return tf.config.list_logical_devices(kind)


def _short(device: Any) -> str:
    text = device if isinstance(device, str) else getattr(device, "name", None)
    try:
        spec = tf.DeviceSpec.from_string(text)
    except (ValueError, TypeError, AttributeError):
        spec = None
    if spec is None or spec.device_type not in ("CPU", "GPU"):
        raise UsageError('A device name must have the form "GPU:0"', "Name a GPU or a CPU of this machine.", device=device)
    return f"{spec.device_type}:{spec.device_index or 0}"


def _found(name: str, devices: Devices) -> str:
    kind, index = name.partition(":")[0], index_of(name)
    there = _logical(kind)
    try:
        return f"{kind}:{index_of(there[index].name)}"
    except IndexError:
        raise UsageError(
            "devices must exist on this machine",
            f"It has {len(_logical('GPU'))} GPUs and {len(_logical('CPU'))} CPU devices. Name these, or leave devices out.",
            devices=devices,
        ) from None


ALL_REDUCE = ("auto", "nccl", "ring", "hierarchical", "one-device")
_HOROVOD = (
    "Horovod is not supported: its last release, 0.28.1 of 2023, does not build against TensorFlow 2.21 "
    "(highwayhash/arch_specific.h, which xla/printer.h includes, is not among the headers TensorFlow installs), and it has no "
    "tf.distribute.Strategy. "
    'Use all_reduce="nccl", which Horovod also uses on GPUs, or "ring".'
)


def check_all_reduce(name: str) -> None:
    """Refuse an all-reduce that does not exist on any machine.

    Args:
        name: The `all_reduce` argument.

    Raises:
        UsageError: If there is no all-reduce of that name.
        Unavailable: For Horovod.
    """
    if name == "horovod":
        raise Unavailable(_HOROVOD)
    if name not in ALL_REDUCE:
        raise UsageError(f"all_reduce must be one of {', '.join(ALL_REDUCE)}", all_reduce=name)


def on_one_host(name: str, devices: tuple[str, ...], options: Any, first_key: int) -> Any:
    """Return the cross-device operation for a MirroredStrategy.

    Args:
        name: One of `ALL_REDUCE`.
        devices: The devices whose values are summed.
        options: The `CommunicationOptions` of a ring.
        first_key: The first key of a ring's collectives.

    Returns:
        A `tf.distribute.CrossDeviceOps`.

    Raises:
        UsageError: If this all-reduce does not work on these devices.
    """
    # TensorFlow's own default, a collective, can lose its key inside `while` and `cond` (several steps in one call, or an
    # optimizer that is built while tracing), and one failed collective poisons the process. So only an explicit "ring" uses it.
    if len(devices) == 1:
        return tf.distribute.ReductionToOneDevice()
    shared = shares_hardware(devices)
    if name == "auto":
        # NCCL's older operations, unlike its collectives, work in loops; they refuse two ranks on one GPU.
        operation = tf.distribute.ReductionToOneDevice() if shared else tf.distribute.NcclAllReduce()
        operation.chosen_automatically = True  # for tools that put another in its place: nobody asked for this one
        return operation
    if name == "nccl" and shared:
        raise UsageError(
            "NCCL needs GPUs that are separate pieces of hardware",
            'Use all_reduce="auto", which reduces to one device here.',
            devices=devices,
        )
    if name == "hierarchical" and len(devices) % 2:
        # Two groups of half the devices, rounded down: 3 devices sum to 2 (TensorFlow 2.21).
        raise UsageError(
            "TensorFlow's HierarchicalCopyAllReduce needs an even number of devices: with an odd number it drops one",
            'Use all_reduce="one-device" or "auto", or an even number of devices.',
            devices=devices,
        )
    make = {"nccl": tf.distribute.NcclAllReduce, "hierarchical": tf.distribute.HierarchicalCopyAllReduce}
    return (
        upstream.ring(devices, options, first_key) if name == "ring" else make.get(name, tf.distribute.ReductionToOneDevice)()
    )


def between_hosts(name: str, bytes_per_pack: int | None, timeout_seconds: float | None) -> Any:
    """Return the options for collectives, also those between hosts.

    Args:
        name: `auto` and `ring` give a ring; `nccl` gives NCCL.
        bytes_per_pack: Size in bytes of the packs in which gradients are summed; None for one pack.
        timeout_seconds: A collective that waits longer for a peer raises an error; None for no limit.

    Returns:
        A `tf.distribute.experimental.CommunicationOptions`.

    Raises:
        UsageError: If the all-reduce works on one host only.
    """
    kinds = tf.distribute.experimental.CommunicationImplementation
    implementation = {"auto": kinds.RING, "ring": kinds.RING, "nccl": kinds.NCCL}.get(name)
    if implementation is None:
        raise UsageError(
            "all_reduce between hosts must be a ring or NCCL", 'Use all_reduce="auto", "ring" or "nccl".', all_reduce=name
        )
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=bytes_per_pack or 0, timeout_seconds=timeout_seconds, implementation=implementation
    )


_last: list[weakref.ref[Any]] = []


def _remember(strategy: tf.distribute.Strategy) -> Any:
    """Remember a strategy of several replicas for as long as it exists.

    Args:
        strategy: The new strategy.

    Returns:
        The same strategy.
    """
    if strategy.num_replicas_in_sync > 1:
        _last[:] = [weakref.ref(strategy)]
    return strategy


def warn_of_one_device(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Warn if a model is made outside every scope although a strategy with several replicas exists.

    Args:
        model: A model.
        strategy: The strategy that will train it.
    """
    if not _last or tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy() or _last[0]() is None:
        return
    gc.collect()
    last = _last[0]()
    if last is not None:
        warnings.warn(
            "A model must be made in the scope of a strategy to be trained on all devices. Received: "
            f"model={getattr(model, 'name', type(model).__name__)!r}, made outside of a scope. One device trains it alone: "
            f"{type(last).__name__} with {last.num_replicas_in_sync} replicas is not used. Make it under `with "
            "strategy.scope():`. To train on one device on purpose, use the scope of tf.distribute.OneDeviceStrategy.",
            stacklevel=3,
        )
