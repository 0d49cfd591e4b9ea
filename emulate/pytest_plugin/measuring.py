"""Measure the coverage of code on hosts if pytest-cov measures the run, in files that pytest-cov combines at the end."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class CoverageMeasurement:
    """Describe how pytest-cov measures.

    Attributes:
        source: Packages and folders; None for all that is beneath the working directory.
        branch: Whether branches count; None as coverage's own configuration has it.
        config_file: The file of that configuration.
        data_file: Where the results go, without the endings of parts.
        by_test: Whether it is told which test ran what.
    """

    source: list[str] | None
    branch: bool | None
    config_file: Any
    data_file: str
    by_test: bool

    @classmethod
    def by(cls, config: pytest.Config) -> CoverageMeasurement | None:
        """Return how this run is measured, or None."""
        plugin = config.pluginmanager.get_plugin("_cov")
        measuring = getattr(getattr(plugin, "cov_controller", None), "cov", None)
        if measuring is None:
            return None
        option = config.option
        return cls(
            source=option.cov_source or None,
            branch=option.cov_branch,
            config_file=option.cov_config,
            data_file=os.path.abspath(measuring.config.data_file),
            by_test=getattr(option, "cov_context", None) == "test",
        )


class Measuring:
    """Measure coverage in this process.

    Args:
        plan: How; None for not at all.
    """

    def __init__(self, plan: CoverageMeasurement | None) -> None:
        self._plan = plan
        self._coverage: Any = None
        if plan is None:
            return
        import coverage

        self._coverage = coverage.Coverage(
            data_file=plan.data_file,
            data_suffix=f"gpudist.{os.getpid()}.{uuid.uuid4().hex}",
            source=plan.source,
            branch=plan.branch,
            config_file=plan.config_file,
        )
        # A host runs some of the tests: that it did not import all is nothing to warn of.
        unimported = ["module-not-imported", "module-not-measured", "no-data-collected"]
        disabled = self._coverage.get_option("run:disable_warnings") or []
        self._coverage.set_option("run:disable_warnings", [*disabled, *unimported])

    @contextlib.contextmanager
    def during(self, test: str = "") -> Iterator[None]:
        """Measure what runs meanwhile, in this thread and those that it starts; what was measured is on disk afterwards.

        Args:
            test: The test that is run, if it is one.
        """
        if self._coverage is None or self._plan is None:
            yield
            return
        self._coverage.start()
        try:
            if self._plan.by_test and test:
                self._coverage.switch_context(f"{test}|run")
            yield
        finally:
            self._coverage.stop()
            self._coverage.save()
            self._coverage.get_data().close()
