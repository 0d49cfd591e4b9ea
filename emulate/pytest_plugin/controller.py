"""Control tests that run on hosts: which tests, with what, and what is reported."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emulate.errors import GpudistError, Unavailable, UsageError
from emulate.pytest_plugin import marks, upstream
from emulate.pytest_plugin.clusters import Clusters
from emulate.pytest_plugin.merge import HostRun, finished, interrupted, merge, setup_reports, verdict_of
from emulate.pytest_plugin.options import (
    DEVICE,
    EMULATED,
    HOST,
    IN_PROCESS,
    NO_DEVICE,
    NOTE,
    REASON,
    TOPOLOGY,
    VERDICT,
    settings,
)
from emulate.pytest_plugin.third_party_plugins import CoverageMeasurement, sendable, spare_snapshots, worker_input
from emulate.pytest_plugin.wire import START_SECONDS, Ended, EventsOfTest, SessionPlan, TestPlan
from emulate.topology import Topology

if TYPE_CHECKING:
    from emulate.cluster import Lease
    from emulate.pytest_plugin.host_session import InProcess

_FINISH_SECONDS = 60.0
_NAME = "gpudist-controller"  # among the plugins of pytest


def controller_of(config: pytest.Config) -> Controller:
    """Return the one controller of this pytest process."""
    controller: Controller | None = config.pluginmanager.get_plugin(_NAME)
    if controller is None:
        controller = Controller(config)
        config.pluginmanager.register(controller, _NAME)
    return controller


def expect_tests(config: pytest.Config) -> None:
    """Note that a test with a topology was found, and start what takes time."""
    if HOST not in config.stash and not config.pluginmanager.has_plugin(_NAME):
        controller = controller_of(config)
        if not config.getoption("collectonly") and not controller.settings.in_process:
            with contextlib.suppress(Unavailable, UsageError):  # said of each test that lacks it
                controller.clusters.warm_up()


class Controller:
    """Run the tests of hosts in place of pytest's own protocol.

    Args:
        config: Pytest's.

    Attributes:
        settings: What the user asked for.
        clusters: What tests run on.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.settings = settings(config)
        self.clusters = Clusters(self.settings, config)
        self._is_worker = hasattr(config, "workerinput")
        self._next: dict[str, pytest.Item] | None = None
        self._options: dict[str, Any] | None = None
        self._last: dict[marks.Place, pytest.Item] = {}
        self._num_tests = 0
        self._folder: Path | None = None
        self._told: set[str] = set()
        self._notes = spare_snapshots(config)
        self._interrupted = ""
        self._in_process: InProcess | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test on its hosts; leave every other to pytest."""
        if self._is_worker:  # of pytest-xdist, which does not know what else it runs
            self._leave([place for place in self._last if place[0] != item.path])
        topology = marks.topology_of(item)
        if topology is None:
            return None
        if marks.hosts_of(item) is None:
            item.user_properties.append((TOPOLOGY, str(topology)))
            return None
        if self._is_in_process(item):
            item.user_properties += [(TOPOLOGY, str(topology)), (DEVICE, EMULATED)]
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = self._reports(item, nextitem, topology)
        if not self._is_worker and self._following(item, nextitem) is None:
            self._leave([place for place in [marks.place_of(item)] if place is not None])
        if (late := upstream.tear_down(item, nextitem)) is not None:
            reports.append(late)  # fixtures of earlier tests beside the hosts, which ended with this one
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item) -> bool | None:
        """Replace pytest-timeout's alarm by a deadline: hosts can report where they are, an alarm cannot."""
        return None if marks.hosts_of(item) is None or self._is_in_process(item) else True

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Refuse a mark that was not read, and prepare a test that runs in this process."""
        if not marks.is_of_framework(item) and not upstream.is_doctest(item):
            marks.check_places(item)
        if self._is_in_process(item):
            try:
                self._prepare_in_process(item)
            except UsageError as error:
                pytest.fail(str(error), pytrace=False)

    def _is_in_process(self, item: pytest.Item) -> bool:
        topology = marks.hosts_of(item) if self.settings.in_process else None
        return topology is not None and not topology.has_several_hosts and not topology.num_ps

    def _prepare_in_process(self, item: pytest.Item) -> None:
        from emulate.pytest_plugin.host_session import InProcess

        topology, wanted = marks.topology_of(item), marks.wanted_by(item)
        assert topology is not None
        assert wanted is not None
        if self._in_process is None:
            self._in_process = InProcess(topology)
        self._num_tests += 1
        folder = self._temporary() / f"test-{self._num_tests}"
        self._in_process.begin(topology, wanted.strategy, folder, self.settings.seed)
        item.stash[IN_PROCESS] = self._in_process

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record the outcome of a test beside the hosts in its properties, as for tests on hosts."""
        report = yield
        is_told = any(name == VERDICT for name, _ in item.user_properties)
        if marks.topology_of(item) is not None and not is_told and (report.when == "call" or not report.passed):
            properties: list[tuple[str, object]] = [(VERDICT, verdict_of([report]))]
            item.user_properties += properties
            report.user_properties += properties
        return report

    def _reports(self, item: pytest.Item, nextitem: pytest.Item | None, topology: Topology) -> list[pytest.TestReport]:
        started = time.time()
        try:
            wanted = marks.wanted_by(item)
            assert wanted is not None
            marks.check_places(item)
            self._check(item, topology, wanted)
            return self._run(item, nextitem, topology, wanted)
        except Unavailable as error:
            properties = self._properties(topology, NO_DEVICE, "skipped", str(error))
            return setup_reports(item, "skipped", started, str(error), properties)
        except (GpudistError, pytest.fail.Exception) as error:  # the latter from somebody's alarm
            return setup_reports(item, "failed", started, str(error), [(TOPOLOGY, str(topology)), (VERDICT, "error")])

    def _check(self, item: pytest.Item, topology: Topology, wanted: marks.Wanted) -> None:
        if "gpudist" in getattr(item, "fixturenames", ()):
            raise UsageError(
                "`gpudist` verifies programs outside of the hosts. Received: a test that asks for it and for strategy, "
                "devices or shared_path, so that its body runs on hosts. Make two tests of it."
            )
        if self._config.getoption("trace", False):
            raise UsageError(
                "--trace needs a terminal, and a host has none. Received: --trace and a test that runs on hosts. "
                "Run a test on 1xN in pytest's own process: --gpudist-in-process."
            )

    def _run(
        self, item: pytest.Item, nextitem: pytest.Item | None, topology: Topology, wanted: marks.Wanted
    ) -> list[pytest.TestReport]:
        from emulate.pytest_plugin.host import run_test

        started = time.time()
        plan = self._plan(item, nextitem, topology, wanted)
        deadline = wanted.deadline or self.settings.deadline
        place = (item.path, topology)
        with self.clusters.lease(topology, str(item.path), fresh=wanted.fresh) as lease:
            news = self._news(lease.notes + self._notes)
            watch = EventsOfTest(self._config, lease, item, deadline)
            limit, patience = deadline + START_SECONDS, self.settings.patience
            if not wanted.fresh:
                self._last.pop(place, None)  # interrupted, its hosts are gone
            try:
                results = lease.run(run_test, plan, timeout=limit, patience=patience, on_event=watch.take, resets=False)
            except KeyboardInterrupt:
                self._interrupted = interrupted(item, lease.stacks())
                raise
            trainers = [
                host for host, role in enumerate(lease.roles) if role != "ps" and not (topology.num_ps and role == "worker")
            ]
            runs = [watch.run_of(host, results[host]) for host in trainers]
            if not lease.is_broken:
                ends = [run.result.value for run in runs]
                if wanted.fresh or any(isinstance(end, Ended) and end.failed_in_tensorflow for end in ends):
                    self._finish(lease, item)
                else:
                    self._last[place] = item  # its hosts stay, with what is set up there
        shutil.rmtree(plan.shared, ignore_errors=True) if all(run.is_passed for run in runs) else None
        self._obey(item, runs)
        reports = merge(item, runs, watch.deadline, self.settings.patience, started)
        properties = self._properties(topology, lease.device, verdict_of(reports)) + news
        if self._config.getoption("setuponly", False):
            properties = [(TOPOLOGY, str(topology))]  # nothing ran there that could pass
        return watch.late_reports() + finished(reports, properties, self._note(reports))

    def _news(self, notes: list[str]) -> list[tuple[str, object]]:
        """Return what the user should know about this machine and was not told yet."""
        news = [note for note in dict.fromkeys(notes) if note not in self._told]
        self._told.update(news)
        return [(NOTE, str(note)) for note in news]  # pytest-xdist sends no subclass of str

    def _note(self, reports: list[pytest.TestReport]) -> str:
        if self._config.getoption("usepdb", False) and any(report.failed for report in reports):
            return (
                "--pdb was not entered: the body ran on hosts, processes without a terminal. "
                "Run a test on 1xN in pytest's own process: --gpudist-in-process."
            )
        return ""

    def _obey(self, item: pytest.Item, runs: list[HostRun]) -> None:
        """Follow a host's request that concerns the whole run."""
        for run in runs:
            if isinstance(ended := run.result.value, Ended):
                if ended.exit_reason is not None:
                    pytest.exit(f"{ended.exit_reason} ({run.name} of {item.nodeid})", ended.exit_code)
                if ended.stop:
                    item.session.shouldstop = ended.stop

    def _properties(self, topology: Topology, device: str, verdict: str, reason: str = "") -> list[tuple[str, object]]:
        properties: list[tuple[str, object]] = [(TOPOLOGY, str(topology)), (DEVICE, device), (VERDICT, verdict)]
        return properties + ([(REASON, reason)] if reason else [])

    def _plan(self, item: pytest.Item, nextitem: pytest.Item | None, topology: Topology, wanted: marks.Wanted) -> TestPlan:
        following = None if wanted.fresh else self._following(item, nextitem)
        self._num_tests += 1
        return TestPlan(
            session=self._session_plan(item),
            nodeid=upstream.nodeid_of(item),
            next_nodeid=upstream.nodeid_of(following) if following is not None else None,
            is_last=following is None and (wanted.fresh or not self._is_worker),
            strategy=wanted.strategy,
            shared=self._temporary() / f"test-{self._num_tests}",
            seed=self.settings.seed,
        )

    def _following(self, item: pytest.Item, nextitem: pytest.Item | None) -> pytest.Item | None:
        """Return the next test of the same hosts. A worker of pytest-xdist knows one test ahead only."""
        if self._is_worker:
            return nextitem if nextitem is not None and marks.place_of(nextitem) == marks.place_of(item) else None
        if self._next is None:
            self._next, after = {}, dict[marks.Place, pytest.Item]()
            for test in reversed(item.session.items):
                place = marks.place_of(test)
                if place is not None:
                    if place in after:
                        self._next[test.nodeid] = after[place]
                    after[place] = test
        return self._next.get(item.nodeid)

    def _session_plan(self, item: pytest.Item) -> SessionPlan:
        if self._options is None:
            self._options = sendable(vars(self._config.option))
            if self._options.get("hypothesis_seed", "") is None:  # hosts that run the same collectives need the same examples
                self._options["hypothesis_seed"] = str(self.settings.seed)
            places = {place for test in item.session.items if (place := marks.place_of(test)) is not None}
            for path in {path for path, _ in places}:
                self.clusters.expect(topology for of, topology in places if of == path)
        return SessionPlan(
            options=self._options,
            args=list(self._config.args),
            path=item.path,
            temporary=self._temporary(),
            worker=worker_input(self._config),
            markers=list(self._config.getini("markers")),
            measured=CoverageMeasurement.by(self._config),
        )

    def _temporary(self) -> Path:
        if self._folder is None:
            self._folder = upstream.base_folder(self._config) / "hosts"
            self._folder.mkdir(exist_ok=True)
        return self._folder

    @contextlib.contextmanager
    def cluster(self, item: pytest.Item, topology: Topology) -> Iterator[Any]:
        """Provide a cluster for a test beside the hosts."""
        from emulate.cluster import Cluster

        device, timeout = self.settings.device, self.deadline_of(item)
        try:
            with self.clusters.turn() as preload, Cluster(topology, preload=preload, device=device, timeout=timeout) as made:
                item.user_properties += [(DEVICE, EMULATED if made.device == "cpu" else made.device)]
                yield made
                item.user_properties += self._news(made.notes)
        except Unavailable as error:
            item.user_properties += self._properties(topology, NO_DEVICE, "skipped", str(error))
            pytest.skip(str(error))

    def deadline_of(self, item: pytest.Item) -> float:
        """Return how many seconds a test may take on hosts."""
        wanted = marks.wanted_by(item)
        return (wanted.deadline if wanted is not None else None) or self.settings.deadline

    def pytest_sessionfinish(self) -> None:
        """Tear down what is set up on the hosts that are left."""
        self._leave(list(self._last))

    def _leave(self, places: list[marks.Place]) -> None:
        """End the hosts of places where no more tests run, if they are there: the pool ends some to make room."""
        for path, topology in places:
            item = self._last.pop((path, topology), None)
            if item is not None and self.clusters.has_idle(topology, str(path)):
                with contextlib.suppress(GpudistError), self.clusters.lease(topology, str(path)) as lease:
                    self._finish(lease, item)

    def _finish(self, lease: Lease, item: pytest.Item) -> None:
        """Tear down what is set up on hosts that get no more tests, and end them."""
        from emulate.pytest_plugin.host import finish

        lease.end_hosts()
        watch = EventsOfTest(self._config, lease, item, _FINISH_SECONDS)
        results = lease.run(finish, timeout=_FINISH_SECONDS, patience=self.settings.patience, on_event=watch.take, resets=False)
        errors = [result.error.traceback_text for result in results if result.status == "raised" and result.error is not None]
        for report in watch.late_reports(everything=True):
            item.ihook.pytest_runtest_logreport(report=report)
        for error in errors[:1]:
            said = f"The session of pytest on hosts of {lease.topology} did not end well:\n{error}"
            for report in setup_reports(item, "failed", time.time(), said, [(TOPOLOGY, str(lease.topology))])[:1]:
                report.when = "teardown"
                item.ihook.pytest_runtest_logreport(report=report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print where hosts were when they were interrupted; with details on request, how the clusters fared."""
        if self._interrupted:
            terminalreporter.section("interrupted on hosts")
            terminalreporter.write_line(self._interrupted)
        if self._config.get_verbosity() > 0:
            for line in self.clusters.history():
                terminalreporter.write_line(f"gpudist: {line}")

    def pytest_unconfigure(self) -> None:
        """End every process."""
        self.clusters.close()
