"""Generated layouts: expire-snapshots, expire-partitions, restore, a discarded quarantine and an export with
``remove_gone`` change no byte outside of their plan.

Most layouts are those of ``test_orphan_layouts``. The generator knows of each file whether it may go; nothing here
parses a path.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import JobFailed, OperationFailed, TableRecord
from distop.errors import DistopError, InvalidArgument
from distop.storage import export_targets
from distop.storage.deletion_scope import OWN
from distop.tables.expiration import KEPT, REMOVED, Choice, Expiration, RetentionRule
from distop.tables.reachability import DATA, METADATA, ReadableVersion, TableFile, Unit
from distop_behaviors.expire import ExpirePartitions, expire_completion, expire_plan
from distop_behaviors.expire.partition_argument import ExpirePartitionsArgument
from distop_behaviors.orphans import table_folder
from tests.support.context import FakeContext, complete, run_jobs
from tests.support.export_runs import ExportRun
from tests.support.orphan_runs import Run, snapshot, wait_until_older
from tests.unit.behaviors.test_expire_snapshots import Expiring
from tests.unit.behaviors.test_orphan_layouts import (
    NAMES,
    Layout,
    Named,
    form,
    generated,
    in_memory,
    linked,
    needed_forms,
    spelled,
    written,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

__all__ = ["in_memory"]

LAYOUTS = 2_000
"""Of each operation."""
GROUP = 100
FIRST = 10
"""Layouts at each change."""
GROUPS = [
    range(FIRST),
    *(pytest.param(range(at, at + GROUP), marks=pytest.mark.rotating) for at in range(FIRST, LAYOUTS, GROUP)),
]
each_group = pytest.mark.parametrize("seeds", GROUPS, ids=lambda seeds: str(seeds.start))
Files = dict[str, bytes | str]


def counted(seeds: range, ends: Sequence[str], expected: set[str]) -> None:
    """Assert that all ends of these layouts came to pass."""
    assert len(ends) == len(seeds)
    assert set(ends) == expected, {end: ends.count(end) for end in set(ends)}


def around(made: Layout) -> Files:
    return snapshot(made.root / "lake") | snapshot(made.root / "elsewhere")


def swap_folder(made: Layout, folder: Path) -> None:
    """Move a folder aside, and put a link in its place."""
    aside = made.root / "lake" / f"aside{made.random.randint(0, 1 << 30)}"
    folder.rename(aside)
    folder.symlink_to(aside)


# ---- expire-snapshots


class VersionsOfLayout(Expiration):
    """A table with two versions: the old one has ``expired``, the new one what the layout needs."""

    def __init__(self, made: Layout, expired: list[str], state: dict[str, int]) -> None:
        self._made, self._expired, self._state = made, expired, state
        self._named = made.reachability()
        self.reachability = _WithState(self._named, state)

    def versions(self) -> Sequence[ReadableVersion]:
        return [ReadableVersion("2"), *([] if self._state["commits"] else [ReadableVersion("1")])]

    def choose(self, rule: RetentionRule) -> Choice:
        return Choice(("1",), (), tuple(TableFile(path, METADATA) for path in self._expired[:2]))

    def units(self, choice: Choice) -> Iterator[tuple[Unit, str]]:
        yield Unit("old", DATA), REMOVED
        yield Unit("new", DATA), KEPT

    def named(self, unit: Unit, whose: str, choice: Choice, rule: RetentionRule) -> Iterator[tuple[TableFile, bool]]:
        for path in self._made.needed[: self._state["planned"]] if whose == KEPT else self._expired:
            yield TableFile(path, DATA), whose == KEPT

    def commit(self, choice: Choice, rule: RetentionRule, context: Any) -> None:
        self._state["commits"] = 1

    def needed(self, covered: Collection[str], rule: RetentionRule, *, data: bool) -> Iterator[str]:
        yield self._made.source
        yield from self._made.needed[self._state["planned"] if "new" in covered else 0 :]


class ExpiringOfLayout(Expiring):
    """An operation that knows the other tables of a layout."""

    def __init__(self, made: Layout, work: Path) -> None:
        super().__init__(made.table, work)
        self._others = {one.name: one for one in made.others}

    def context(self) -> FakeContext:
        ctx = super().context()
        ctx.tables = self._others
        return ctx


class _WithState(Named):
    def __init__(self, found: Named, state: dict[str, int]) -> None:
        self.__dict__.update(found.__dict__)
        self._commits = state["commits"]

    @property
    def state(self) -> str:
        return f"{self.source}{self._commits}"


def expire(seed: int, root: Path, patch: pytest.MonkeyPatch) -> str:
    """Expire a version of a layout; returns what became of it."""
    made = generated(seed, root)
    rng = made.random
    links = [str(path) for path in Path(made.place).rglob("*") if path.is_symlink()]
    old = sorted(made.orphans | made.doubtful)
    chosen = [one for one in old if rng.random() < 0.8]
    plain = {one for one in chosen if rng.random() < 0.6}
    expired = [one if one in plain else spelled(rng, one, made) for one in chosen]
    # Files that both versions have, under any spelling, and files that are not the table's.
    expired += [spelled(rng, one, made) for one in made.needed if one.startswith(made.place) and rng.random() < 0.5]
    foreign = [
        f"{made.place}2/f1",
        f"{made.place}/../t2/f1",
        str(made.root / "elsewhere"),
        f"{made.place}/{OWN}/stage/0",
    ]
    foreign += [f"{link}/{rng.choice(('f1', 'v1.metadata.json', 'metadata/v1.metadata.json'))}" for link in links]
    foreign += [made.source, made.place, "relative", "", "s3://bucket/f1", f"{made.place}/a\0b"]
    expired += rng.sample(foreign, rng.randint(0, 3)) + (links if rng.random() < 0.5 else [])
    rng.shuffle(expired)
    state = {"commits": 0, "planned": len(made.needed)}
    for module in (expire_plan, expire_completion):
        patch.setattr(module, "expiration_of", lambda *_, **__: VersionsOfLayout(made, expired, state))
    patch.setattr(expire_plan, "place_of", lambda *_, **__: made.place)
    run = ExpiringOfLayout(made, root / "work")
    before = around(made)
    refused = "an unclear path" in made.refusals or "a registered table" in made.refusals
    try:
        run.plan().run_jobs()
    except InvalidArgument:
        assert refused, seed
        assert around(made) == before, seed
        return "refused"
    assert not refused, seed
    assert around(made) == before, seed
    hit: set[str] = set()
    files = sorted(one for one in chosen if Path(one).is_file())
    for one in rng.sample(files, min(2, len(files))) if rng.random() < 0.5 else []:
        folder = Path(one).parent
        how = rng.choice(("needed", "linked", "folder linked"))
        if how == "needed":
            made.needed.append(one)
            hit.add(one)
        elif how == "linked" and not any(parent.is_symlink() for parent in Path(one).parents):
            Path(one).unlink()
            Path(one).symlink_to(made.source)
            hit.add(one)
        elif str(folder) != made.place and not folder.is_symlink():
            hit |= {other for other in chosen if other.startswith(f"{folder}/")}
            swap_folder(made, folder)
    before = around(made)
    try:
        report, message = run.complete()
        assert bool(message) == bool(report.failed_files), seed
    except DistopError:
        assert hit or links, seed  # a link on the way to a file
    gone = set(before) - set(after := around(made))
    assert {path: data for path, data in before.items() if path not in gone} == after, seed
    assert gone <= set(chosen) - {one for one in hit if one in before}, (seed, gone - set(chosen))
    forms, names = needed_forms(made)
    names |= {form(one.rpartition("/")[2]) for one in made.needed if form(one) not in forms}
    names |= {
        form(one.rpartition("/")[2]) for one in made.needed if not one.startswith((made.place, f"file:{made.place}"))
    }
    assert not {one for one in gone if form(one) in forms}, seed
    if not hit and not links:
        clear = {one for one in plain if one in made.orphans and form(one.rpartition("/")[2]) not in names}
        assert gone >= {one for one in clear if form(one) not in forms}, (seed, clear - gone)
    return "attacked" if hit else "expired"


@each_group
def test_only_files_of_expired_snapshots_change_in_generated_layouts(
    seeds: range, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [expire(seed, in_memory / str(seed), monkeypatch) for seed in seeds]
    counted(seeds, ends, {"refused", "attacked", "expired"})


# ---- expire-partitions on folders

TODAY = datetime.now(UTC).date()


def hidden(name: str) -> bool:
    """Whether readers of folders skip a file or folder of this name."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def day(days: int) -> str:
    return f"{TODAY - timedelta(days=days)}"


OLD = (f"day={day(400)}", f"day={day(91)}", f"day={day(200)}")
KEEP = (
    *(f"day={day(n)}" for n in (0, 1, 89)),
    *("day=__HIVE_DEFAULT_PARTITION__", "day=", "day=2024-13-45", f"day={TODAY.year}", "day=-1", "day=x", "day=%2e%2e"),
    *(f"day= {day(400)}", f"day={day(400)} ", f"day={day(400)}.", f"day={day(400)}%20", f"day={day(400)}\u0301"),
    *(f"day={day(400)}%2F..%2Fday={day(1)}", f"day=\u0661{day(400)[1:]}"),
)
"""Partitions that are young, or whose value is no day for certain."""
BESIDE = (
    f".{OLD[0]}/f.parquet",
    f"_tmp/{OLD[0]}/f.parquet",
    f"_distop/stage/{OLD[0]}/f.parquet",
    f"{OLD[0]}/_f.parquet",
)
"""Files that readers skip."""


def expire_partitions(seed: int, root: Path) -> str:
    """Expire the partitions of a generated folder; returns what became of it."""
    rng = random.Random(f"partitions {seed}")
    table = root / "lake" / rng.choice(("t", "t a", "t%20a", "te\u0301", "day=2020-01-01"))
    inner = rng.random() < 0.3
    old: set[str] = set()
    for name in (*OLD, *KEEP):
        for n in range(rng.randint(0, 2)):
            end = f"{rng.choice(NAMES)}-{n}.parquet" if rng.random() < 0.7 else f"{n}.parquet"
            path = f"{table}/{name}/{f'k={n}/' if inner else ''}{end}"
            if written(path, f"{seed} {name} {n}") and name in OLD and not hidden(end):
                old.add(path)
    for name in rng.sample(BESIDE, rng.randint(0, 2)):
        written(f"{table}/{name}", "beside")
    for suffix in ("2", " ", "%20", "/../other"):
        written(f"{table}{suffix}/{OLD[0]}/0.parquet", "beside")
    others = [TableRecord("v", "parquet", f"{table}/{OLD[0]}")] if rng.random() < 0.1 else []
    lies_in = rng.random() < 0.1
    if lies_in:
        (table / OLD[0]).mkdir(parents=True, exist_ok=True)
        (table / OLD[0] / "l").symlink_to(root / "lake")
    if not any(table.glob("day=*/**/*.parquet")):
        return "refused"
    record = TableRecord("t", "parquet", str(table))
    ctx = FakeContext(root / "work", record)
    ctx.tables = {one.name: one for one in others}
    argument = ExpirePartitionsArgument.model_validate({"column": "day", "older_than": "90d", "max_fraction": 1.0})
    before = snapshot(root / "lake")
    try:
        plans = list(ExpirePartitions().partitions(record, argument, ctx).partitions)
    except DistopError:
        assert snapshot(root / "lake") == before, seed
        return "refused"
    assert not others, seed
    assert snapshot(root / "lake") == before, seed
    planned = {path for plan in plans for path, _, _ in plan.files}
    assert planned <= old, (seed, planned - old)
    hit: set[str] = set()
    for one in rng.sample(sorted(old), min(2, len(old))) if rng.random() < 0.5 else []:
        how, folder = rng.choice(("replaced", "linked", "folder linked", "added")), Path(one).parent
        if folder.is_symlink() or not Path(one).is_file():
            continue
        if how == "added":
            written(f"{folder}/new", "new")
        elif how == "folder linked":
            hit |= {path for path in old if path.startswith(f"{folder}/")}
            folder.rename(root / "lake" / f"aside{len(hit)}-{rng.random()}")
            folder.symlink_to(next(iter((root / "lake").glob("aside*"))))
        else:
            Path(one).unlink()
            Path(one).write_text("another content") if how == "replaced" else Path(one).symlink_to(f"{table}2")
            hit.add(one)
    before = snapshot(root / "lake")
    failed = False
    try:
        rows = run_jobs(ExpirePartitions(), argument, plans, ctx)
        complete(ExpirePartitions(), argument, record, rows, plans, ctx, version="")
    except (DistopError, OperationFailed):
        failed = True
        assert hit, seed
    after = snapshot(root / "lake")
    gone = set(before) - set(after)
    assert {path: data for path, data in before.items() if path not in gone} == after, seed
    assert gone <= old - hit, (seed, gone - old)
    if not failed and not lies_in and not any(one in hit for one in old):
        assert gone == old, (seed, old - gone)
    return "attacked" if hit else "expired"


@each_group
def test_only_files_of_expired_partitions_change_in_generated_folders(seeds: range, in_memory: Path) -> None:
    ends = [expire_partitions(seed, in_memory / str(seed)) for seed in seeds]
    counted(seeds, ends, {"refused", "attacked", "expired"})


# ---- restore, and the deletion of a quarantine


def quarantined(seed: int, root: Path, patch: pytest.MonkeyPatch) -> tuple[Layout, Run, Files, list[str]] | None:
    """A layout whose orphans are in the quarantine, with the files before and the keys of the moved ones."""
    made = generated(seed, root)
    if made.refusals or linked(Path(made.place)):
        return None
    patch.setattr(table_folder, "reachability_of", lambda *_, **__: made.reachability())
    run = Run(made.table, root / "work", made.others)
    before = around(made)
    run.remove(run.plan(quarantine=True), quarantine=True)
    moved = [path[len(made.place) + 1 :] for path in sorted(set(before) - set(around(made)))]
    return (made, run, before, moved) if moved else None


def restore(seed: int, root: Path, patch: pytest.MonkeyPatch) -> str:
    """Restore a quarantine in which files were changed; returns what became of it."""
    found = quarantined(seed, root, patch)
    if found is None:
        return "none"
    made, run, before, moved = found
    rng, place = made.random, Path(made.place)
    quarantine = place / OWN / "quarantine" / "c0ffee"
    [operation] = [path for path in quarantine.rglob("1") if path.is_dir()][:1]
    # The quarantines of another operation and of another namespace have the same files.
    for other in (operation.parent / "2", place / OWN / "quarantine" / "cafe" / operation.relative_to(quarantine)):
        written(f"{other}/{rng.choice(moved)}", "of another")
    hit: set[str] = set()
    for key in rng.sample(moved, min(2, len(moved))) if rng.random() < 0.7 else []:
        how, target, source = (
            rng.choice(("exists", "link", "folder", "replaced", "linked")),
            place / key,
            operation / key,
        )
        if (
            not source.is_file()
            or source.is_symlink()
            or any(up.is_symlink() for up in (*target.parents, *source.parents))
        ):
            continue
        if how == "exists" and written(str(target), "written since"):
            hit.add(key)
        elif how == "link" and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(made.source)
            hit.add(key)
        elif how == "folder" and str(target.parent) != made.place and not any(target.parent.glob("*")):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.parent.rmdir()
            target.parent.symlink_to(f"{made.place}2")
            hit |= {one for one in moved if f"{place}/{one}".startswith(f"{target.parent}/")}
        elif how in ("replaced", "linked"):
            source.unlink()
            source.write_text("replaced") if how == "replaced" else source.symlink_to(made.source)
            hit.add(key)
    now = around(made)
    report: dict[str, Any] = {}
    try:
        report = run.restore()
    except (DistopError, JobFailed):
        assert hit, seed
    after = around(made)
    assert {f"{operation}/{key}" for key in moved} >= set(now) - set(after), seed
    for path in set(after) - set(now):
        key = path[len(made.place) + 1 :]
        assert key in moved, (seed, path)
        assert after[path] == now[f"{operation}/{key}"], (seed, path)
    assert {path: now[path] for path in set(now) & set(after)} == {path: after[path] for path in set(now) & set(after)}
    assert sorted(map(str, now.values())) == sorted(map(str, after.values())), (seed, "a content is lost or doubled")
    if not hit:
        assert report["restored"]["files"] == len(moved), seed
        assert {path: after[path] for path in before} == before, seed
    return "attacked" if hit else "restored"


@each_group
def test_a_restoration_changes_only_quarantined_files_in_generated_layouts(
    seeds: range, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [restore(seed, in_memory / str(seed), monkeypatch) for seed in seeds]
    counted(seeds, ends, {"none", "attacked", "restored"})


def discard(seed: int, root: Path, patch: pytest.MonkeyPatch) -> str:
    """Delete the quarantine of this namespace; returns what became of it."""
    found = quarantined(seed, root, patch)
    if found is None:
        return "none"
    made, run, _, moved = found
    rng, place = made.random, Path(made.place)
    quarantine = place / OWN / "quarantine" / "c0ffee"
    for other in ("cafe", "C0FFEE", "c0ffee2", "c0ffee%2e", ".."):
        written(f"{place}/{OWN}/quarantine/{other}/t/remove-orphans/1/{rng.choice(moved)}", "of another")
    wait_until_older(made.place)
    mine = {path for path in snapshot(quarantine) if "/.." not in path}
    run.operation = "t/remove-orphans/2"
    plans = run.plan(discard_quarantine=0)
    hit: set[str] = set()
    for one in rng.sample(sorted(mine), min(2, len(mine))) if rng.random() < 0.6 else []:
        how, folder = rng.choice(("replaced", "linked", "folder linked")), Path(one).parent
        if folder.is_symlink() or any(up.is_symlink() for up in folder.parents) or not Path(one).is_file():
            continue
        if how == "folder linked":
            hit |= {path for path in mine if path.startswith(f"{folder}/")}
            swap_folder(made, folder)
        else:
            Path(one).unlink()
            Path(one).write_text("another content") if how == "replaced" else Path(one).symlink_to(made.source)
            hit.add(one)
    before = around(made)
    try:
        run.remove(plans, discard_quarantine=0)
    except DistopError:
        assert hit, seed
    after = around(made)
    gone = set(before) - set(after)
    assert {path: data for path, data in before.items() if path not in gone} == after, seed
    assert gone <= mine - hit, (seed, gone - mine)
    if not hit:
        assert gone == mine, (seed, mine - gone)
    return "attacked" if hit else "discarded"


@each_group
def test_only_files_of_the_own_quarantine_are_discarded_in_generated_layouts(
    seeds: range, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [discard(seed, in_memory / str(seed), monkeypatch) for seed in seeds]
    counted(seeds, ends, {"none", "attacked", "discarded"})


# ---- an export with remove_gone


def remove_gone(seed: int, root: Path) -> str:
    """Export a folder, remove some of its files, and export it again; returns what became of it."""
    rng = random.Random(f"export {seed}")
    source, target = (
        root / "lake" / rng.choice(("t", "t a", "te\u0301")),
        root / "out" / rng.choice(("x", "x%20y", "..x")),
    )
    files = [f"k={rng.choice(NAMES)}/{rng.choice(NAMES)}" for _ in range(rng.randint(3, 8))]
    files = [one for one in files if written(f"{source}/{one}.parquet", f"{seed} {one}")]
    for suffix in ("2", " ", "/../y"):
        written(f"{target}{suffix}/{files[0]}.parquet", "beside")
    export_targets.configure([str(root / "out")])
    run = ExportRun(TableRecord("t", "parquet", str(source)), str(target), root / "work")
    try:
        first = run.run()
    except DistopError:
        assert not target.exists() or not any(path.is_file() for path in target.rglob("*.parquet")), seed
        return "refused"
    if not first.report or not first.report["complete"]:
        return "refused"  # it has the name of a file that an export writes
    exported = {path for path in snapshot(target) if path.endswith(".parquet")}
    chosen = rng.sample(sorted(files), rng.randint(1, len(files)))
    gone = {f"{target}/{one}.parquet" for one in chosen} & exported
    for one in chosen:
        Path(f"{source}/{one}.parquet").unlink(missing_ok=True)
    hit: set[str] = set()
    for one in exported:
        written(f"{Path(one).parent}/own-{rng.randint(0, 9)}", "of a user")
    run.operation = "t/export/2"
    try:
        plans, version = run.plan(remove_gone=True)
    except DistopError:
        assert not any(path.is_file() and not hidden(path.name) for path in source.rglob("*")), seed
        return "refused"
    for one in rng.sample(sorted(gone), min(2, len(gone))) if rng.random() < 0.6 else []:
        folder = Path(one).parent
        how = rng.choice(("replaced", "linked", "folder linked"))
        if folder.is_symlink() or not Path(one).is_file():
            continue
        if how == "folder linked" and folder != target:
            hit |= {path for path in exported if path.startswith(f"{folder}/")}
            aside = root / "out" / f"aside{rng.randint(0, 1 << 30)}"
            folder.rename(aside)
            folder.symlink_to(aside)
        else:
            Path(one).unlink()
            Path(one).write_text("another content") if how == "replaced" else Path(one).symlink_to(source)
            hit.add(one)
    before = {path: data for path, data in snapshot(root / "out").items() if not own_of_export(path)}
    sources = snapshot(source)
    try:
        rows = run.jobs(plans, remove_gone=True)
        run.complete(rows, plans, version, remove_gone=True)
    except (DistopError, OSError):
        assert hit, seed
    after = {path: data for path, data in snapshot(root / "out").items() if not own_of_export(path)}
    assert snapshot(source) == sources, seed
    lost = set(before) - set(after)
    assert {path: data for path, data in before.items() if path not in lost} == {
        p: after[p] for p in set(before) - lost
    }
    assert set(after) - set(before) <= exported, seed  # behind a link that was made meanwhile
    assert lost <= gone - hit, (seed, lost - gone)
    if not hit:
        assert lost == gone, (seed, gone - lost)
    return "attacked" if hit else "removed"


def own_of_export(path: str) -> bool:
    """Whether an export writes this file besides the copies."""
    return f"/{OWN}/" in path or path.endswith((".json", "_SUCCESS", "_MANIFEST"))


@each_group
def test_an_export_removes_only_its_own_files_that_are_gone(seeds: range, in_memory: Path) -> None:
    try:
        ends = [remove_gone(seed, in_memory / str(seed)) for seed in seeds]
    finally:
        export_targets.configure(())
    counted(seeds, ends, {"refused", "attacked", "removed"})
