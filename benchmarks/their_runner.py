"""The same all-reduce under TensorFlow's multi_process_runner, which wants to be started as a main program."""

from __future__ import annotations

import time

from tensorflow.python.distribute import multi_process_lib, multi_process_runner, multi_worker_test_base

from benchmarks.all_reduce import HOSTS, all_reduce


def main() -> None:
    """Time it once its own imports are done; it pays for those of its workers."""
    multi_process_lib._test_main_called = True  # outside of TensorFlow's build system nothing else can say so
    started = time.perf_counter()
    cluster = multi_worker_test_base.create_cluster_spec(num_workers=HOSTS)
    multi_process_runner.run(all_reduce, cluster)
    print("seconds", time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
