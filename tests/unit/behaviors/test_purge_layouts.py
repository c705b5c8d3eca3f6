"""Generated layouts: a purge changes no byte outside of its plan, whatever lies beside and inside of the folder.

The layouts are those of ``test_orphan_layouts``: shared prefixes, links, percent escapes, unicode forms, case, foreign
schemes, nested and registered tables. What must go is computed here from the generator's own names; it parses no path.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest

from distop.behavior import PartitionPlan, TableRecord
from distop.errors import DistopError, InvalidArgument
from distop_behaviors.purge import purge_plan
from tests.support.orphan_runs import snapshot
from tests.unit.behaviors.test_orphan_layouts import GROUP, LAYOUTS, Layout, generated, in_memory
from tests.unit.behaviors.test_purge import Purging

__all__ = ["in_memory"]

if TYPE_CHECKING:
    from collections.abc import Callable

ELSEWHERE = ("another scheme", "an unclear path", "a link", "another table inside", "a registered table")
FORGED = 400


def decoded(name: str) -> set[str]:
    """The parts of a name in all of its decoded forms."""
    found: set[str] = set()
    for _ in range(10):
        found |= set(name.split("/"))
        name = unquote(name, errors="surrogateescape")
    return found


def own(made: Layout, path: str) -> str:
    """A path of the generator, spelled plainly; "" if it is not in the table's folder."""
    path = path.removeprefix("file:").removeprefix("//localhost").replace("/./", "/")
    path = "/" + path.lstrip("/")
    while "//" in path:
        path = path.replace("//", "/")
    link = f"{made.root}/link/"
    if path.startswith(link):
        path = f"{made.place}/{path[len(link) :]}"
    return path if path.startswith(f"{made.place}/") else ""


def expected(made: Layout, before: dict[str, Any]) -> tuple[set[str], bool]:
    """The files that a purge must delete, and whether it must be refused."""
    kept = tuple(f"{folder}/" for folder in made.kept_folders)
    needed = [own(made, path) for path in made.needed]
    refused = bool(set(made.refusals) & set(ELSEWHERE)) or "" in needed
    found = {made.source, *needed}
    found |= {path for path in before if path.startswith((*kept, f"{made.place}/_distop/index/"))}
    for path in found:
        refused |= not {"", ".", ".."}.isdisjoint(
            {part for name in path[len(made.place) + 1 :].split("/") for part in decoded(name)}
        )
    return found & set(before), refused


def check(seed: int, root: Path, patch: pytest.MonkeyPatch) -> str:
    """Purge a layout; returns what became of it."""
    made = generated(seed, root)
    patch.setattr(purge_plan, "reachability_of", lambda *_, **__: made.reachability())
    run = Purging(made.table, root / "work", made.others)

    def now() -> dict[str, bytes | str]:
        return snapshot(root / "lake") | snapshot(root / "elsewhere")

    before = now()
    gone, refused = expected(made, before)
    if refused:
        with pytest.raises(InvalidArgument):
            run.plan()
        assert now() == before, seed
        return "refused"
    run.plan()
    assert now() == before, seed
    assert {path for one in run.partitions for path, _, _ in one.files} == gone, seed
    hit = attacked(made, gone - {made.source})
    before = now()
    report, message = run.run_jobs().complete()
    after = now()
    lost = set(before) - set(after)
    assert {path: data for path, data in before.items() if path not in lost} == after, seed
    assert not lost & hit, seed
    if not hit:
        assert (lost, message, report.complete) == (gone, "", True), seed
        assert report.deleted_digest == report.digest, seed
        return "purged"
    assert lost <= gone - hit - {made.source}, seed
    assert not report.complete, seed
    return "attacked"


def attacked(made: Layout, gone: set[str]) -> set[str]:
    """Sometimes change files between plan and deletion; returns those that must stay."""
    rng, hit = made.random, set[str]()
    if not gone or rng.random() < 0.6:
        return hit
    for one in rng.sample(sorted(gone), min(2, len(gone))):
        how = rng.choice(("replaced", "linked", "folder linked", "added"))
        folder = Path(one).parent
        if how == "added":
            new = f"{made.place}/added{rng.randint(0, 99)}"
            Path(new).write_text("new")
            # Without a clock that tells, it could have been there before the plan.
            os.utime(new, (4e9, 4e9))
            hit.add(new)
        elif how == "folder linked" and str(folder) != made.place and not folder.is_symlink():
            inside = {path for path in gone if path.startswith(f"{folder}/")}
            aside = made.root / "lake" / f"aside{rng.randint(0, 1 << 30)}"
            folder.rename(aside)
            folder.symlink_to(aside)
            hit |= inside
        elif Path(one).exists() and not any(parent.is_symlink() for parent in Path(one).parents):
            Path(one).unlink()
            if how == "replaced":
                Path(one).write_text("another content")
            else:
                Path(one).symlink_to(made.source)
            hit.add(one)
    return hit


@pytest.mark.parametrize(
    "group", [0, *(pytest.param(n, marks=pytest.mark.rotating) for n in range(1, LAYOUTS // GROUP))]
)
def test_only_planned_files_change_in_generated_layouts(
    group: int, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: dict[str, int] = {}
    for seed in range(group * GROUP, (group + 1) * GROUP):
        end = check(seed, in_memory / str(seed), monkeypatch)
        ends[end] = ends.get(end, 0) + 1
    assert set(ends) == {"refused", "attacked", "purged"}
    assert all(count > GROUP // 20 for count in ends.values())


# ---- forged plans

PIECES: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: rng.choice(
        ("..", ".", "", "%2e%2e", "%2E%2E", "%252e%252e", "..%2f", "%2f", "..\\", "...", " ..", "..;")
    ),
    lambda rng: rng.choice(("secret", "Secret", "se\u0301cret", "t", "T", "t2", "data", "link", "x.parquet")),
    lambda rng: rng.choice(("_distop", "_distop/index", "_distop/stage", "_distop/quarantine", "_distop//index")),
    lambda rng: chr(rng.choice((0, 10, 37, 47, 92, 127, 0x2024, 0x2044, 0xFF0E, 0xFF0F, 0x202E))) * rng.randint(1, 2),
)


def forged(rng: random.Random, root: Path) -> str:
    """A path that leads, by some reading, to a file outside of the table's folder ``root/t``."""
    start = rng.choice(
        (
            *(f"{root}/t", f"{root}/t/", f"{root}", f"{root}/T", f"{root}/t2", "", "/", f"file://{root}/t"),
            *(f"file:{root}/t", f"s3://bucket{root}/t", f"FILE://{root}/t", f"{root}/t/_distop/index"),
            *(f"{root}/t/link", f"{root}/./t"),
        )
    )
    pieces = [rng.choice(PIECES)(rng) for _ in range(rng.randint(0, 5))]
    end = rng.choice(("secret", "../secret", "../t2/secret", "link/secret", "_distop/stage/own", "", "."))
    return "/".join((start, *pieces, end))


def test_a_forged_plan_deletes_nothing_outside_of_the_table(tmp_path: Path) -> None:
    """Submitters can write plans. Each path has the size and the time of the file that it may lead to."""
    rng = random.Random(21)
    for name in ("t/data/x.parquet", "secret", "t2/secret", "t/_distop/stage/own", "T/secret", "e/secret"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    (tmp_path / "t" / "link").symlink_to(tmp_path / "e")
    run = Purging(TableRecord("t", "parquet", str(tmp_path / "t")), tmp_path / "work")

    def outside() -> dict[str, bytes | str]:
        return {path: data for path, data in snapshot(tmp_path).items() if not path.startswith(f"{tmp_path}/work")}

    before = outside()
    refused = 0
    for n in range(FORGED):
        path = forged(rng, tmp_path)
        plan = PartitionPlan(1, "data-000001", files=((path, 1, 10**18),))
        try:
            run.partitions = [plan]
            run.run_jobs()
        except (DistopError, ValueError):
            refused += 1
        assert outside() == before, (n, path)
    assert refused > FORGED // 2
