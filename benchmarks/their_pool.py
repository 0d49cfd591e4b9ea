"""Warm runs under TensorFlow's MultiProcessPoolRunner, which wants to be started as a main program.

Its argument is the number of hosts. It prints the seconds of as many runs in a row as each line of its standard input asks for.
"""

from __future__ import annotations

import sys
import time

from benchmarks.all_reduce import total


def main() -> None:
    from tensorflow.python.distribute import multi_process_lib, multi_process_runner, multi_worker_test_base

    multi_process_lib._test_main_called = True  # outside of TensorFlow's build system nothing else can say so
    cluster = multi_worker_test_base.create_cluster_spec(num_workers=int(sys.argv[1]))
    runner = multi_process_runner.MultiProcessPoolRunner(cluster)
    runner.run(total)
    print("up", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            started = time.perf_counter()
            runner.run(total)
            print("seconds", time.perf_counter() - started, flush=True)
    runner.shutdown()


if __name__ == "__main__":
    main()
