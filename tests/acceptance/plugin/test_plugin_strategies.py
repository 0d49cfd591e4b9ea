"""Every strategy that CPUs allow trains in a test's body, in every kind of test."""

from __future__ import annotations

from tests.acceptance.plugin.conftest import Run

STRATEGIES = '''
import pytest
import tensorflow as tf

TARGET = tf.constant(3.0)  # a tensor of the module, made before any strategy


def trained(strategy):
    """One variable on its way to 3, the gradients of all replicas averaged."""
    with strategy.scope():
        weight = tf.Variable(0.0)

    @tf.function
    def step():
        def replica():
            gradient = 2 * (weight - TARGET)
            context = tf.distribute.get_replica_context()
            mean = context.all_reduce("mean", gradient)
            weight.assign_sub(0.25 * mean)
        strategy.run(replica)

    for _ in range(3):
        step()
    return float(weight.numpy())


@pytest.mark.topology("1x1", "1x2", "2x1", "2x2")
def test_the_strategy_of_the_place(strategy, topology):
    kind = {"1x1": "OneDevice", "1x2": "Mirrored"}.get(str(topology), "CollectiveAllReduce")
    assert type(strategy).__name__ == kind + "Strategy"
    assert strategy.num_replicas_in_sync == topology.num_replicas
    assert trained(strategy) == 3 * (1 - 0.5**3)


@pytest.mark.topology("1x2", strategy="mirrored")
def test_mirrored(strategy):
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert trained(strategy) == 2.625


@pytest.mark.topology("1x2", strategy="central-storage")
def test_central_storage(strategy):
    assert isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
    with strategy.scope():
        weight = tf.Variable(0.0)
    mean = strategy.reduce("mean", strategy.run(lambda: 2 * (weight - TARGET)), axis=None)
    assert float(mean) == -6.0


@pytest.mark.topology("1x2", strategy="one-device")
def test_one_device(strategy):
    assert isinstance(strategy, tf.distribute.OneDeviceStrategy)
    assert trained(strategy) == 2.625


@pytest.mark.topology("1x2", strategy="default")
def test_default_strategy(strategy):
    assert strategy is tf.distribute.get_strategy()
    assert trained(strategy) == 2.625


@pytest.mark.topology("2x1", strategy="multi-worker")
def test_multi_worker(strategy):
    assert trained(strategy) == 2.625


@pytest.mark.topology("2x1")
def test_a_strategy_of_ones_own():
    assert trained(tf.distribute.MultiWorkerMirroredStrategy()) == 2.625


@pytest.mark.topology("1x1+1ps")
def test_parameter_server(strategy):
    assert isinstance(strategy, tf.distribute.ParameterServerStrategy)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(1.0)
    coordinator.schedule(tf.function(lambda: weight.assign_add(2.0)))
    coordinator.join()
    assert float(weight) == 3.0


def total(value):
    import gpudist_core

    strategy = gpudist_core.make_strategy()
    per_replica = strategy.run(tf.function(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(value))))
    return float(strategy.experimental_local_results(per_replica)[0])


@pytest.mark.topology("1x2", "2x1")
def test_beside_the_hosts(cluster, topology):
    assert cluster.run(total, 1.5) == [3.0] * topology.num_hosts
'''

TEST_CASES = """
import tensorflow as tf
import unittest
import pytest
from absl.testing import parameterized as absl_parameterized
from parameterized import parameterized


@pytest.mark.topology("1x2", "2x1")
class TestOfTensorFlow(tf.test.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.shared = []

    def setUp(self):
        super().setUp()
        self.shared.append(self.strategy.num_replicas_in_sync)

    def test_it(self):
        self.assertEqual(self.shared, [2])
        self.assertLen(self.devices, self.topology.num_devices)
        total = self.strategy.reduce("sum", self.strategy.run(lambda: tf.constant(1.0)), axis=None)
        self.assertAllClose(total, 2.0)


class TestOfUnittest(unittest.TestCase):
    @parameterized.expand([("two", 2), ("three", 3)])
    @pytest.mark.topology("1x2")
    def test_expanded(self, name, number):
        total = self.strategy.reduce("sum", self.strategy.run(lambda: tf.constant(float(number))), axis=None)
        self.assertEqual(float(total), 2.0 * number)


class TestOfAbsl(tf.test.TestCase, absl_parameterized.TestCase):
    @pytest.mark.topology("1x2", strategy="mirrored")
    @absl_parameterized.parameters(2, 3)
    def test_absl(self, number):
        self.assertIsInstance(self.strategy, tf.distribute.MirroredStrategy)

    def test_without_a_mark(self):
        self.assertFalse(hasattr(self, "strategy"))
"""


def test_every_strategy_trains_in_the_body_of_a_test(run: Run) -> None:
    result = run(STRATEGIES, "-v")
    result.assert_outcomes(passed=13)
    result.stdout.fnmatch_lines(
        ["gpudist: 13 tests ran on emulated devices (1x1: 1, 1x1+1ps: 1, 1x2: 6, 2x1: 4, 2x2: 1), 0 on *"]
    )


def test_tests_of_unittest_tensorflow_and_absl_run_on_hosts(run: Run) -> None:
    result = run(TEST_CASES)
    result.assert_outcomes(passed=7, skipped=2)  # test_session of tf.test.TestCase, which skips itself
    result.stdout.fnmatch_lines(["gpudist: 6 tests ran on emulated devices (1x2: 5, 2x1: 1), 0 on real devices"])
