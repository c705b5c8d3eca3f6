"""Rules that hold for every test: nothing is left out unseen in CI, and property tests are repeatable there."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from distop.runtime import gc_tuning
from scripts import etcd_servers
from tests.distributing import TURNS, Turned, Units, has_turn, rank, share
from tests.support.daemons import STARTED
from tests.support.needs import in_ci

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

FIGURES = "figures"
"""The property (``record_property``) under which a test says what it measured: printed in the end, also of a test that
ran in another process.
"""
FAULTS = "tests/faults"
"""The tests that take longest. What they take together is printed: those that are not ``slow`` run in CI, and are meant
to stay under three minutes.
"""
MAY_SKIP = Path(__file__).parent / "docker"

# A shell that runs the tests in its background has them ignore interrupts, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A third of what collecting takes is looks for garbage, of which there is hardly any.
gc_tuning.tune_for_start()

# Other work on the same two cores must not fail a property: examples are bounded by number, not by time.
# At each change, and with --slow.
for name, examples in (("some", 30), ("many", 200)):
    hypothesis.settings.register_profile(
        name, deadline=None, max_examples=examples, derandomize=in_ci(), print_blob=in_ci()
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too")
    parser.addoption(
        "--turn",
        type=int,
        help=f"of the tests marked rotating run one in {TURNS}, others for each number (default: all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Put the etcd server of this run first on ``PATH``, and choose how many examples properties are tried with."""
    hypothesis.settings.load_profile("many" if config.getoption("--slow") else "some")
    try:
        etcd_servers.use()
    except etcd_servers.Unavailable as error:
        if etcd_servers.wanted(config.args):
            raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str | None:
    """Which etcd server this run uses, where it runs tests that need one, and which turn it has."""
    turn = config.getoption("--turn")
    rotating = "" if turn is None else f"rotating tests: turn {turn % TURNS} of {TURNS} (--turn {turn})\n"
    if not etcd_servers.wanted(config.args):
        return rotating.rstrip() or None
    name, wanted = etcd_servers.use().name, etcd_servers.chosen()
    instead = "" if name == wanted else f", because {wanted} is not built: scripts/etcd builds it"
    return f"{rotating}etcd: {name}{instead}"


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if share() is None or (path / "__init__.py").exists():
        return None
    return Turned.from_parent(parent, path=path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and leave out those that this run does not choose.

    The longest units start first, in one order for all processes of a run. Without --slow, tests marked slow are left
    out; with --turn, so are those marked rotating whose turn it is not.
    """
    if share():
        items.sort(key=lambda item: item.path)
    items.sort(key=lambda item: rank(item.nodeid))
    if config.getoption("--slow"):
        return
    turn = config.getoption("--turn")

    def left_out(item: pytest.Item) -> bool:
        waits = turn is not None and item.get_closest_marker("rotating") and not has_turn(item.nodeid, turn)
        return bool(item.get_closest_marker("slow") or waits)

    config.hook.pytest_deselected(items=[item for item in items if left_out(item)])
    items[:] = [item for item in items if not left_out(item)]


def pytest_collection_finish() -> None:
    gc_tuning.freeze_loaded(collect=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of a run in several processes, as scripts/test makes one."""
    if config.getvalue("dist") != "loadfile":
        return None
    return Units(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests measured, of those that passed and of those that did not."""
    reports = [report for some in ("passed", "failed") for report in terminalreporter.getreports(some)]
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == FIGURES and report.when == "call":
                terminalreporter.write_sep("-", report.nodeid)
                terminalreporter.write_line(str(value))
    ran = [report for some in terminalreporter.stats.values() for report in some if _of_faults(report)]
    if ran:
        names, seconds = {report.nodeid for report in ran}, sum(report.duration for report in ran)
        terminalreporter.write_line(f"{FAULTS}: {len(names)} tests took {seconds:.0f} s, one after the other")


def _of_faults(report: object) -> bool:
    return isinstance(report, pytest.TestReport) and report.nodeid.startswith(f"{FAULTS}/")


def pytest_runtest_logstart() -> None:
    STARTED.clear()


class _Malformed(logging.Handler):
    """Collects the transactions that etcd, or its model, rejects as invalid."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if text := getattr(record, "malformed", ""):
            self.found.append(text)


@pytest.fixture(autouse=True)
def well_formed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which a transaction is built that etcd rejects as invalid.

    It may be built in this process, or in daemons that the test has started. Tests marked ``malformed`` are excepted.
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
    """A failure is told with the story of the daemons that the test started. In CI a skipped test outside tests/docker
    has failed: what is never run is not known to work.
    """
    report = yield
    if report.when == "call" and report.failed:
        report.sections += [("daemons", group.diagnosis()) for group in STARTED]
    if report.skipped and not hasattr(report, "wasxfail") and in_ci() and MAY_SKIP not in item.path.parents:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: no test may be left out in CI ({reason})"
    return report
