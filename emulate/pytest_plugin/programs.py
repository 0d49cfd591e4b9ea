"""Define the fixture `gpudist`: programs under test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from emulate.pytest_plugin.keys import DEVICE, EMULATED, TOPOLOGY, VERDICT
from emulate.pytest_plugin.marks import topology_of

if TYPE_CHECKING:
    from emulate.pytest_plugin.controller import Controller
    from emulate.verify import Verdict


class Programs:
    """Verify programs in a test, with the settings of the run. All tests share one process to fork from.

    Args:
        controller: The controller of this pytest.
        item: The test.

    Example:
        @pytest.mark.topology("1x4", "2x2")
        def test_training(gpudist):
            gpudist.assert_equivalent("train.py")
    """

    def __init__(self, controller: Controller, item: pytest.Item) -> None:
        self._controller = controller
        self._item = item

    def verify(self, program: Any, topology: Any = None, **options: Any) -> Verdict:
        """Verify a program as `emulate.verify` does.

        Args:
            program: As for `emulate.verify`.
            topology: As for `emulate.verify`. Default: the test's own.
            **options: As for `emulate.verify`.

        Returns:
            The verdict. The test's properties also carry it.
        """
        from emulate.verify import verify

        wanted = topology or topology_of(self._item) or "1x4"
        asked = self._controller.settings
        options = {"device": asked.device, "seed": asked.seed, "timeout": self._controller.deadline_of(self._item), **options}
        with self._controller.verifying(self._item) as preload:
            verdict = verify(program, wanted, preload=preload, **options)
        self._note(verdict)
        return verdict

    def assert_equivalent(self, program: Any, topology: Any = None, **options: Any) -> None:
        """Raise AssertionError with the report unless the program trains the same model, as `emulate.assert_equivalent` does.

        Args:
            program: As for `emulate.verify`.
            topology: As for `emulate.verify`. Default: the test's own.
            **options: As for `emulate.verify`.

        Raises:
            AssertionError: With the whole report as its text.
        """
        from emulate.report import check_equivalent

        __tracebackhide__ = True
        check_equivalent(self.verify(program, topology, **options))

    def _note(self, verdict: Verdict) -> None:
        runs = verdict.runs
        kind = EMULATED if verdict.device == "cpu" else verdict.device
        properties = {
            TOPOLOGY: ", ".join(run.topology for run in runs),
            DEVICE: kind,
            VERDICT: ", ".join(run.verdict for run in runs),
        }
        kept = [pair for pair in self._item.user_properties if pair[0] not in properties]
        self._item.user_properties[:] = kept + list(properties.items())
