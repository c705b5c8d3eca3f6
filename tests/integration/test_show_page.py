"""``show --html`` on a real etcd with scripted daemons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import State
from tests.integration.cli_namespace import TABLE, CliNamespace, cli, ref
from tests.integration.scripted_daemons import ScriptedDaemons
from tests.support.command import distop_command
from tests.support.etcd import compacted, own_etcd, shared_etcd
from tests.support.html import Parsed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop.store.embedded import EmbeddedEtcd
    from tests.support.command import Ran

__all__ = ["cli", "distop_command", "own_etcd", "shared_etcd"]

pytestmark = pytest.mark.etcd

OP = "nyc.flights/noop/1"
HOSTILE = '<script>"day"</script>&\'订单'


async def end_some_jobs(scripted: ScriptedDaemons) -> None:
    """Of five jobs one succeeded, one failed, one waits for a retry, one runs, and one has not started."""
    op = ref(OP)
    await scripted.plan(op, "n1", ["day=0", HOSTILE, "day=2", "day=3", "day=4"])
    fences = await scripted.claim(op, "n1", 0, 1, 2, 3)
    await scripted.report(op, 0, fences[0], name="day=0")
    await scripted.report(op, 1, fences[1], error="no <b>such</b> file\nat line 1", name=HOSTILE)
    await scripted.wait_again(op, 2, fences[2], "disk full")


async def end_all_jobs(scripted: ScriptedDaemons) -> None:
    op = ref(OP)
    await scripted.plan(op, "n1", ["day=0", HOSTILE])
    fences = await scripted.claim(op, "n1", 0, 1)
    await scripted.report(op, 0, fences[0], name="day=0")
    await scripted.report(op, 1, fences[1], error="no file", name=HOSTILE)
    await scripted.decide(op, "n1", State.FAILED, 2, 1)
    await scripted.finish(op, "n1", State.FAILED, {"rows": 7, HOSTILE: [HOSTILE]})


def test_the_page_of_an_open_operation_has_its_jobs_and_errors(cli: CliNamespace, tmp_path: Path) -> None:
    cli.distop("start", "noop", TABLE, "--arg", '{"jobs": 5}')
    cli.with_daemons(end_some_jobs)
    file = tmp_path / "page.html"
    ran = cli.distop("show", OP, "--html", str(file))
    assert (ran.code, ran.out, ran.err) == (0, f"{OP}: page written to {file}\n", "")
    found = Parsed(file.read_text(encoding="utf-8"))
    for words in ("A snapshot of", "2 of 5 jobs had ended (40%)", "noop: Does nothing.", "jobs 5", HOSTILE,
                  "no <b>such</b> file", "disk full", "1 waiting for a retry", "1 running", "1 not started",
                  "day=4"):  # fmt: skip
        assert words in found.text, words
    assert found.all("script") == found.all("b", title="") == []
    ran = cli.distop("show", OP, "--html", "-")
    assert (ran.code, ran.err) == (0, "")
    assert len(Parsed(ran.out).tags) == len(found.tags)


def test_a_page_is_written_to_a_file_with_json_on_stdout(cli: CliNamespace, tmp_path: Path) -> None:
    cli.distop("start", "noop", TABLE)
    file = tmp_path / "page.html"
    ran = cli.distop("show", OP, "--html", str(file), "--json")
    assert ran.json.keys() == cli.distop("show", OP, "--json").json.keys()
    assert "it had no plan yet; it waited for planning" in Parsed(file.read_text()).text
    cli.with_daemons(end_all_jobs)
    ran = cli.distop("show", OP, "--html", str(file), "--json")
    assert ran.json == cli.distop("show", OP, "--json").json


def test_an_unwritable_file_is_reported_in_one_line(cli: CliNamespace, tmp_path: Path) -> None:
    cli.distop("start", "noop", TABLE)
    kept = tmp_path / "kept.html"
    kept.write_text("unchanged")
    for argv, code, words in (
        (("show", OP, "--html", "/dev/full"), 2, "/dev/full cannot be written: No space left on device"),
        (("show", "nyc.flights/noop/9", "--html", str(kept)), 4, "no operation nyc.flights/noop/9"),
    ):
        ran = cli.distop(*argv)
        assert (ran.code, words in ran.sentence) == (code, True), ran
    assert kept.read_text() == "unchanged"


def test_after_the_cleanup_a_page_reads_partitions_from_etcds_history(
    own_etcd: EmbeddedEtcd, distop_command: Callable[..., Ran]
) -> None:
    cli = CliNamespace(own_etcd.endpoint, distop_command)
    cli.distop("start", "noop", TABLE, "--arg", '{"jobs": 2}')
    cli.with_daemons(end_all_jobs)
    before = cli.distop("show", OP, "--html", "-").out

    async def clean(scripted: ScriptedDaemons) -> None:
        await scripted.clean(ref(OP), "n1")
        for name in ("arg", "spec"):
            assert await scripted.etcd.get(scripted.keys.of(ref(OP), name)) is None

    cli.with_daemons(clean)
    after = Parsed(cli.distop("show", OP, "--html", "-").out)
    for words in ("Failed: 1 of 2 jobs failed.", "jobs 2", HOSTILE, "no file", "rows 7"):
        assert words in after.text, words
    assert [cell["title"].partition(":")[0] for cell in after.all("li") if "title" in cell] == ["day=0", HOSTILE]
    assert len(after.tags) == len(Parsed(before).tags)

    async def compact(scripted: ScriptedDaemons) -> None:
        revision, _ = await scripted.etcd.read_at()
        await compacted(scripted.etcd, revision)

    cli.with_daemons(compact)
    gone = Parsed(cli.distop("show", OP, "--html", "-").out)
    assert "The states of the partitions are gone" in gone.text
    assert "Failed: 1 of 2 jobs failed." in gone.text
    assert "no file" not in gone.text
