"""Make the matching `tf.distribute.Strategy` for where the program runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gpudist_core.environments import Tasks, find_tasks, num_gpus, show_own_gpus
from gpudist_core.errors import UsageError
from gpudist_core.strategies.all_reduce import between_hosts, check_all_reduce, check_flag, check_numbers, on_one_host
from gpudist_core.strategies.last_strategy import remember
from gpudist_core.strategies.named import Devices, chosen_devices
from gpudist_core.strategies.peers import wait_for
from gpudist_core.strategies.step_timeout import set_limit
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
    check_numbers(bytes_per_pack, timeout_seconds)
    check_flag("time_each_collective", time_each_collective)
    tasks = find_tasks(cluster)
    wish = _Wish(kind, devices, all_reduce, bytes_per_pack, timeout_seconds, time_each_collective, variable_partitioner)
    if kind in ("multi-worker", "parameter-server") or (kind == "auto" and tasks and tasks.trains):
        return remember(_in_cluster(wish, tasks, cluster))
    if tasks and tasks.trains:
        raise UsageError(
            f"In a cluster of {len(tasks.peers) + 1} tasks, all tasks must train one model ({tasks.source})",
            "Leave kind out. For a separate model on each host, unset TF_CONFIG (in Slurm: SLURM_STEP_NUM_TASKS).",
            kind=kind,
        )
    return remember(_on_one_host(wish))


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
            return _limited(tf.distribute.MultiWorkerMirroredStrategy(resolver, options), wish)
    if upstream.is_initialized():
        raise UsageError(
            "A strategy of several hosts must be made before TensorFlow's runtime starts",
            "Call make_strategy() before the first tensor, variable, model or list of logical devices.",
            kind="multi-worker",
        )
    show_own_gpus()
    wait_for(tasks.peers, tasks.address, tasks.leader, wish.timeout_seconds)
    with upstream.keeping_sigterm():
        return _limited(tf.distribute.MultiWorkerMirroredStrategy(_resolver(tasks, cluster), options), wish)


def _limited(strategy: tf.distribute.Strategy, wish: _Wish) -> Any:
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
