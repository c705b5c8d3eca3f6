"""Rules for every test: CI skips none silently, and property tests are repeatable there."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from distop.runtime import gc_tuning
from distop.storage import store_waits
from scripts import built_programs, etcd_servers
from tests.distributing import (
    TURNS,
    UNIT_TESTS,
    OwnShareFirst,
    Units,
    collects_unit_tests,
    has_turn,
    rank,
    share,
)
from tests.support.daemons import STARTED
from tests.support.needs import in_ci
from tests.support.service import ServiceThread

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

FIGURES = "figures"
"""The property (``record_property``) with the measurements of a test. They are printed at the end, also for a test that
ran in another process.
"""
FAULTS = "tests/faults"
"""The folder whose tests take longest. Their total time is printed: CI runs those not marked ``slow``, which should
take less than three minutes.
"""
STORES = ("store", "served", "lake")
"""The parameters of tests that name an object store."""
MAY_SKIP = {Path(__file__).parent / name for name in ("browser", "docker")}
"""Folders of tests that need programs which not every machine can have: a container engine, a browser."""

# A shell that runs the tests in the background makes them, and every process that they start, ignore interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Garbage collection would take a third of the collection time and find almost nothing.
gc_tuning.tune_for_start()

# Other work on the same two cores must not fail a property: the number of examples is limited, not their time.
# "some" for each change, "many" with --slow.
for name, examples in (("some", 30), ("many", 200)):
    hypothesis.settings.register_profile(
        name, deadline=None, max_examples=examples, derandomize=in_ci(), print_blob=in_ci()
    )


SERVICE_TURN = 8
"""The turn in which the clients of daemons are connected to a service, instead of etcd."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too")
    parser.addoption(
        "--turn",
        type=int,
        help=f"run one in {TURNS} of the tests marked rotating; the number chooses which (default: all)",
    )
    parser.addoption(
        "--through-service",
        action="store_true",
        help=f"connect the clients of daemons to a service (also in turn {SERVICE_TURN})",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Put the etcd server of this run first on ``PATH``, and choose the number of examples of a property."""
    hypothesis.settings.load_profile("many" if config.getoption("--slow") else "some")
    turn = config.getoption("--turn")
    ServiceThread.through = config.getoption("--through-service") or (turn is not None and turn % TURNS == SERVICE_TURN)
    try:
        etcd_servers.use()
    except etcd_servers.Unavailable as error:
        if etcd_servers.wanted(config.args):
            raise pytest.UsageError(str(error)) from None


@pytest.fixture
def short_store_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy object store is asked again after some milliseconds."""
    monkeypatch.setattr(store_waits, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(store_waits, "LONGEST_PAUSE", 0.1)


def pytest_report_header(config: pytest.Config) -> str | None:
    """The turn of this run, and its etcd server if its tests need one."""
    turn = config.getoption("--turn")
    rotating = "" if turn is None else f"rotating tests: turn {turn % TURNS} of {TURNS} (--turn {turn})\n"
    if not etcd_servers.wanted(config.args):
        return rotating.rstrip() or None
    name, wanted = etcd_servers.use().name, etcd_servers.chosen()
    instead = "" if name == wanted else f", because {wanted} is not built: scripts/etcd builds it"
    return f"{rotating}etcd: {name}{instead}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Most processes of a run do not collect the unit tests, which takes longer than all other tests."""
    return True if collection_path == config.rootpath / UNIT_TESTS and not collects_unit_tests() else None


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if share() is None or (path / "__init__.py").exists():
        return None
    return OwnShareFirst.from_parent(parent, path=path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and deselect those that this run does not choose.

    The longest units start first, in the same order in all processes of a run. Tests marked direct are deselected if
    clients are connected to a service. Without --slow, tests marked slow are deselected. With --turn, so are the tests
    marked rotating that belong to other turns, and the tests of object stores that are built in other turns.
    """
    if share():
        items.sort(key=lambda item: item.path)
    items.sort(key=lambda item: rank(item.nodeid))
    turn, slow = config.getoption("--turn"), config.getoption("--slow")

    def deselected(item: pytest.Item) -> bool:
        if ServiceThread.through and item.get_closest_marker("direct"):
            return True
        if slow:
            return False
        if item.get_closest_marker("slow"):
            return True
        server = _server_of(item)
        rotates = item.get_closest_marker("rotating") or server in built_programs.SOURCES
        return turn is not None and bool(rotates) and not has_turn(item.nodeid, turn, server)

    config.hook.pytest_deselected(items=[item for item in items if deselected(item)])
    items[:] = [item for item in items if not deselected(item)]


def _server_of(item: pytest.Item) -> str | None:
    """What a test needs besides the default etcd: the program of its marker, or a server of its parameters."""
    if (marker := item.get_closest_marker("program")) is not None:
        return str(marker.args[0])
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    store = next((one for name in STORES if (one := parameters.get(name)) in (*built_programs.SOURCES,)), None)
    etcd = parameters.get("server")
    return store or (None if etcd == etcd_servers.DEFAULT else etcd)


def pytest_collection_finish() -> None:
    gc_tuning.freeze_loaded(collect=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of a run in several processes, as scripts/test starts one."""
    if config.getvalue("dist") != "loadfile":
        return None
    return Units(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the measurements of passed and failed tests, and the total time of the fault tests."""
    reports = [report for some in ("passed", "failed") for report in terminalreporter.getreports(some)]
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == FIGURES and report.when == "call":
                terminalreporter.write_sep("-", report.nodeid)
                terminalreporter.write_line(str(value))
    ran = [report for some in terminalreporter.stats.values() for report in some if _of_faults(report)]
    if ran:
        names, seconds = {report.nodeid for report in ran}, sum(report.duration for report in ran)
        terminalreporter.write_line(f"{FAULTS}: {len(names)} tests took {seconds:.0f} s in total")


def _of_faults(report: object) -> bool:
    return isinstance(report, pytest.TestReport) and report.nodeid.startswith(f"{FAULTS}/")


def pytest_runtest_logstart() -> None:
    STARTED.clear()


class _Malformed(logging.Handler):
    """Collects the transactions that etcd or its model rejects as invalid."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if text := getattr(record, "malformed", ""):
            self.found.append(text)


@pytest.fixture(autouse=True)
def well_formed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which etcd rejects a transaction as invalid.

    This covers transactions of this process and of the daemons that the test started. Tests marked ``malformed`` are
    exempt.
    """
    handler, logger = _Malformed(), logging.getLogger("distop.malformed")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if request.node.get_closest_marker("malformed"):
        return
    lines = (line for group in STARTED for line in group.lines())
    found = [*handler.found, *(line for line in lines if "malformed transaction: " in line)]
    assert not found, "etcd rejects transactions as invalid:\n" + "\n".join(found[:3])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of the test's daemons to the report of a failure.

    In CI a skipped test outside tests/docker and tests/browser fails, so that no test goes unrun without notice.
    """
    report = yield
    if report.when == "call" and report.failed:
        report.sections += [("daemons", group.diagnosis()) for group in STARTED]
    if report.skipped and not hasattr(report, "wasxfail") and in_ci() and not MAY_SKIP & {*item.path.parents}:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: no test may be skipped in CI ({reason})"
    return report
