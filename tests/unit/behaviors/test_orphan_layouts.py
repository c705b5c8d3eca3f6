"""Generated layouts of folders: not one byte outside of the orphans may change, whatever is in the names and paths.

A layout has a table, tables and files beside and inside it whose names are nearly the same, and metadata that spell the
needed files in all ways. The oracle knows of each file whether it is an orphan, because the generator has made it one;
it does not parse paths.
"""

from __future__ import annotations

import os
import random
import tempfile
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest

from distop.behavior import TableRecord
from distop.errors import InvalidArgument
from distop.tables.reachability import DATA, METADATA, Reachability, TableFile, Unit
from distop_behaviors.orphans import table_folder
from tests.support.orphan_runs import Run, snapshot, wait_until_older

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYOUTS = 2_000
GROUP = 100
NAMES = (
    *("a", "A", "b.parquet", "part-0", "day=2024-01-01 10%3A00", "day=2024-01-01 10:00", "x y", "x%20y", "x+y", "%"),
    *("caf\u00e9", "cafe\u0301", "\u212bngstrom", "%2e%2e", "%252e%252e", "..a", "a..", "...", "t", "lake", "é%C3%A9"),
    *("k=__HIVE_DEFAULT_PARTITION__", "a#b", "a?b", "a&b", "'a'", '"', "a\\b", "~", "-rf", "*", "[a]", "$HOME", "{a}"),
    *("s3:", "file:", "hdfs:", "\U0001f600", "metadata", "data", "_x=1", "a" * 60),
)
TABLES = ("t", "T", "t a", "t%20a", "t\u00e9", "te\u0301", "t=1", "t.old")


class Named(Reachability):
    """What the metadata of a layout name."""

    def __init__(self, place: str, source: str, roots: list[str], files: list[str], kept: list[str]) -> None:
        self.place = place
        self.source = source
        self.kept_folders = tuple(kept)
        self._roots = roots
        self._files = files

    def versions(self) -> Any:
        return ()

    def roots(self) -> Iterator[TableFile]:
        yield from (TableFile(path, METADATA) for path in self._roots)

    def named(self, versions: Any = None) -> Iterator[TableFile]:
        return iter(())

    def units(self, versions: Any = None) -> Iterator[Unit]:
        yield Unit(self.source, DATA)

    def files(self, unit: Unit, *, removed: bool = False) -> Iterator[TableFile]:
        yield from (TableFile(path, DATA) for path in self._files)


@dataclass
class Layout:
    """A generated layout. ``refusals``: why it must be refused, if it must."""

    root: Path
    random: random.Random
    table: TableRecord
    others: list[TableRecord] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)
    orphans: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)
    kept_folders: list[str] = field(default_factory=list)
    source: str = ""

    @property
    def place(self) -> str:
        return self.table.location

    def reachability(self) -> Named:
        return Named(self.place, self.source, [self.source], list(self.needed), self.kept_folders)


def written(path: str, content: str) -> bool:
    """Create a file; returns whether that was possible: a name may be a folder's or too long."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("x") as file:
            file.write(content)
    except OSError:
        return False
    return True


def generated(seed: int, root: Path) -> Layout:
    rng = random.Random(seed)
    name = rng.choice(TABLES)
    folder = root / "lake" / rng.choice(("", "db", "x y", "d%41")) / name
    made = Layout(root, rng, TableRecord("t", "iceberg", str(folder)))
    made.source = f"{folder}/metadata/v1.metadata.json"
    written(made.source, "{}")
    (root / "link").symlink_to(folder)
    files = [path(rng, folder) for _ in range(rng.randint(4, 16))]
    for n, one in enumerate(dict.fromkeys(files)):
        if not written(one, f"{seed}-{n}"):
            continue
        if rng.random() < 0.5:
            made.needed.append(spelled(rng, one, made))
            twin(rng, one, made)
        else:
            made.orphans.add(one)
    for n in range(rng.randint(0, 3)):
        one = f"{folder}/_distop/{rng.choice(('index/i/data', 'stage', 'quarantine/x'))}/{n}"
        written(one, "own")
    beside(rng, folder, made)
    for plant in rng.sample(PLANTS, rng.choice((0, 0, 1, 2))):
        plant(rng, made)
    judge(made)
    if not linked(folder):
        wait_until_older(str(folder))
    return made


def linked(folder: Path) -> bool:
    return any(path.is_symlink() for path in folder.rglob("*"))


def path(rng: random.Random, folder: Path) -> str:
    return "/".join([str(folder), *(rng.choice(NAMES) for _ in range(rng.randint(1, 3))), f"f{rng.randint(0, 99)}"])


def spelled(rng: random.Random, one: str, made: Layout) -> str:
    """A path as some writer may spell it in metadata."""
    if rng.random() < 0.15:
        one = one.replace(made.place, str(made.root / "link"), 1)
    at = one.rindex("/")
    return rng.choice(
        (
            lambda: one,
            lambda: one,
            lambda: f"file:{one}",
            lambda: f"file://{one}",
            lambda: f"file://localhost{one}",
            lambda: f"{one[:at]}//{one[at + 1 :]}",
            lambda: f"{one[:at]}/./{one[at + 1 :]}",
        )
    )()


def twin(rng: random.Random, one: str, made: Layout) -> None:
    """Sometimes, a second file whose name some reader takes for that of a needed file."""
    if rng.random() < 0.3:
        name = one[len(made.place) + 1 :]
        for other in {
            unicodedata.normalize("NFC", name),
            unicodedata.normalize("NFD", name),
            name.replace(" ", "%20"),
            name.replace("%20", " "),
            name.replace("%", "%25"),
        } - {name}:
            if ".." not in other.split("/") and written(f"{made.place}/{other}", "twin"):
                made.doubtful.add(f"{made.place}/{other}")


def beside(rng: random.Random, folder: Path, made: Layout) -> None:
    """Files beside the table, in folders of nearly the same name, with the same names as its orphans."""
    for suffix in ("2", "-old", " ", "%20", "."):
        name = f"{folder.name}{suffix}"
        for one in rng.sample(sorted(made.orphans), min(2, len(made.orphans))):
            written(f"{folder.parent}/{name}/{one[len(made.place) + 1 :]}", "beside")
    for name in TABLES:
        if name != folder.name:
            written(f"{folder.parent}/{name}/f{rng.randint(0, 99)}", "beside")
    other = TableRecord("u", "parquet", f"{folder.parent}/{folder.name}2")
    made.others.append(other)


# ---- what makes a layout dangerous


def a_needed_file_elsewhere(rng: random.Random, made: Layout) -> None:
    """A file of the table in another folder; an orphan of the same name is kept."""
    one = path(rng, made.root / "elsewhere")
    if made.orphans and rng.random() < 0.7:
        one = f"{made.root}/elsewhere/{rng.choice(sorted(made.orphans)).rpartition('/')[2]}"
    if written(one, "elsewhere"):
        made.needed.append(one)


def another_scheme(rng: random.Random, made: Layout) -> None:
    prefix = rng.choice(
        ("s3://bucket", "s3a://b", "hdfs://nn:8020", "hdfs://", "gs://b", "abfss://c@a.dfs.core.windows.net")
    )
    made.needed.append(f"{prefix}{made.place}/{rng.choice(NAMES)}/f1")
    made.refusals.append("another scheme")


def an_unclear_path(rng: random.Random, made: Layout) -> None:
    made.needed.append(
        rng.choice((f"{made.place}/../x/f", "relative/f", "s3:/b/f", "", "file://host/f", f"{made.place}/a\0b"))
    )
    made.refusals.append("an unclear path")


def a_link(rng: random.Random, made: Layout) -> None:
    where = f"{made.place}/{rng.choice(('l', 'data', 'k=1/l'))}"
    Path(where).parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(where):
        target = rng.choice((made.root, Path(made.place).parent, Path("/"), Path("nowhere"), Path(made.source)))
        Path(where).symlink_to(target)
        made.refusals.append("a link")


def another_table_inside(rng: random.Random, made: Layout) -> None:
    marker = rng.choice(
        ("metadata/v1.metadata.json", "_delta_log/00000000000000000000.json", ".hoodie/hoodie.properties")
    )
    if written(f"{made.place}/{rng.choice(NAMES)}/{marker}", "{}"):
        made.refusals.append("another table inside")


def a_registered_table(rng: random.Random, made: Layout) -> None:
    folder = rng.choice(
        (
            f"{made.place}/k=1",
            f"file://{made.place}/",
            str(Path(made.place).parent),
            str(made.root),
            str(made.root / "link"),
            f"{made.place}//a/./b",
        )
    )
    made.others.append(TableRecord("v", "parquet", folder))
    made.refusals.append("a registered table")


def a_kept_folder(rng: random.Random, made: Layout) -> None:
    if made.orphans:
        folder = rng.choice(sorted(made.orphans)).rpartition("/")[0]
        if folder != made.place:
            made.kept_folders.append(folder)


PLANTS: list[Callable[[random.Random, Layout], None]] = [
    a_needed_file_elsewhere,
    another_scheme,
    an_unclear_path,
    a_link,
    another_table_inside,
    a_registered_table,
    a_kept_folder,
]


def form(text: str) -> str:
    """A path in the form that is the same for all readers that decode or normalise it."""
    for _ in range(9):
        text = unquote(text, errors="surrogateescape")
    return unicodedata.normalize("NFC", text)


def needed_forms(made: Layout) -> tuple[set[str], set[str]]:
    """The forms of the paths of needed files, and of the names of those in another folder of the generator."""
    elsewhere = f"{made.root}/elsewhere/"
    names = {form(one.rpartition("/")[2]) for one in made.needed if one.startswith(elsewhere)}
    forms = {form(one.removeprefix("file:").removeprefix("//localhost").replace("/./", "/")) for one in made.needed}
    forms = {"/" + "/".join(part for part in one.split("/") if part) for one in forms}
    forms |= {one.replace(form(str(made.root / "link")), form(made.place), 1) for one in forms}
    return forms, names


def judge(made: Layout) -> None:
    """Orphans that are kept in doubt: by their names, which are the same for some reader as those of needed files."""
    forms, names = needed_forms(made)
    kept = tuple(f"{folder}/" for folder in made.kept_folders)
    for one in sorted(made.orphans):
        parts = one[len(made.place) + 1 :].split("/")
        unsafe = any({"", ".", ".."} & set(form(part).split("/")) for part in parts)
        hidden = any(part[0] == "." or (part[0] == "_" and "=" not in part) for part in parts)
        in_kept = any(form(one).startswith(form(folder)) for folder in kept)
        alike = form(one) in forms or form(parts[-1]) in names
        if unsafe or hidden or in_kept or alike:
            made.doubtful.add(one)
    made.orphans -= made.doubtful


def check(seed: int, root: Path, patch: pytest.MonkeyPatch) -> str:
    """Run a layout; returns what became of it."""
    made = generated(seed, root)
    patch.setattr(table_folder, "reachability_of", lambda *_, **__: made.reachability())
    run = Run(made.table, root / "work", made.others)
    before = snapshot(root / "lake") | snapshot(root / "elsewhere")

    def now() -> dict[str, bytes | str]:
        return snapshot(root / "lake") | snapshot(root / "elsewhere")

    arg: dict[str, Any] = {"quarantine": seed % 2 == 0}
    if "another scheme" in made.refusals and made.random.random() < 0.3:
        arg["prefix_mismatch"] = "keep"
        made.refusals.remove("another scheme")
        made.doubtful |= made.orphans  # a file may have the name of that of the other scheme
        made.orphans.clear()
    if made.refusals:
        with pytest.raises(InvalidArgument):
            run.plan(**arg)
        assert now() == before, seed
        return "refused"
    plans = run.plan(**arg)
    assert now() == before, seed
    hit = attacked(made, plans, before)
    report = run.remove(plans, **arg)
    after = now()
    moved = {path: data for path, data in after.items() if "/_distop/quarantine/c0ffee/" in path}
    left = {path: data for path, data in after.items() if path not in moved}
    gone = set(before) - set(left)
    assert gone <= made.orphans | made.doubtful, seed
    assert gone >= made.orphans - hit, seed
    assert not gone & hit, seed
    assert not gone & {one for one in made.doubtful if not arg.get("prefix_mismatch")}, seed
    assert {path: data for path, data in before.items() if path not in gone} == left, seed
    assert report["removed"]["files"] == len(gone), seed
    if arg["quarantine"]:
        assert sorted(moved.values()) == sorted(before[path] for path in gone), seed
        if gone:
            assert run.restore()["restored"]["files"] == len(gone)
            assert now() == before, seed
    else:
        assert not moved
    return "attacked" if hit else "removed"


def attacked(made: Layout, plans: Any, before: dict[str, bytes | str]) -> set[str]:
    """Sometimes change the table between plan and removal; returns the orphans that must stay."""
    if len(plans) < 2 or made.random.random() < 0.5:
        return set()
    some = made.random.sample(sorted(made.orphans), min(2, len(made.orphans)))
    hit: set[str] = set()
    for one in some:
        if one not in made.orphans:  # behind a link by now
            continue
        how = made.random.choice(("replaced", "needed", "linked", "folder linked"))
        if how == "needed":
            made.needed.append(one)
        elif how == "folder linked" and one.rpartition("/")[0] != made.place:
            folder = Path(one.rpartition("/")[0])
            if any(other.startswith(f"{folder}/") for other in made.orphans - {one}):
                continue
            aside = made.root / "lake" / f"aside{made.random.randint(0, 1 << 30)}"
            folder.rename(aside)
            folder.symlink_to(aside)
            renew(made, before)
            made.orphans = {o for o in made.orphans if not o.startswith(f"{folder}/")}
            made.doubtful = {o for o in made.doubtful if not o.startswith(f"{folder}/")}
        else:
            Path(one).unlink()
            if how == "replaced":
                Path(one).write_text("another content")
            else:
                Path(one).symlink_to(made.source)
            renew(made, before)
        hit.add(one)
    return hit


def renew(made: Layout, before: dict[str, bytes | str]) -> None:
    before.clear()
    before.update(snapshot(made.root / "lake") | snapshot(made.root / "elsewhere"))


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if this machine has one: the stores flush each file."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "group",
    [0, *(pytest.param(n, marks=pytest.mark.rotating) for n in range(1, LAYOUTS // GROUP))],
)
def test_only_orphans_change_in_generated_layouts(group: int, in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: dict[str, int] = {}
    for seed in range(group * GROUP, (group + 1) * GROUP):
        end = check(seed, in_memory / str(seed), monkeypatch)
        ends[end] = ends.get(end, 0) + 1
    assert set(ends) == {"refused", "attacked", "removed"}
    assert all(count > GROUP // 20 for count in ends.values())
