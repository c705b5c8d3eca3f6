"""Idempotency of indexes: jobs, completions and operations run twice, in random histories of random tables."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from distop.errors import NotFound
from distop_behaviors.index import BuildIndex, DropIndex, segments
from distop_behaviors.index.key_lookup import find
from scripts.validate_oracle.random_tables import generate
from tests.support.index_runs import Indexes, Operation, data_of, is_cancelled, root_of
from tests.support.repeated_attempts import bytes_below

if TYPE_CHECKING:
    from distop_behaviors.index.index_folder import Folder

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))]
COLUMNS = ["i8", "i64", "u64", "f32", "dec", "day", "ts", "flag", "text"]
STEPS = 5


class World:
    """A table and its index, changed by the steps of a history."""

    def __init__(self, source: Path, home: Path) -> None:
        self.table = home / "t"
        shutil.copytree(source, self.table)
        self.indexes = Indexes(self.table, home / "shared", group_files=2)

    @property
    def folder(self) -> Folder:
        return self.indexes.folder()

    def once(self, behavior: Any, arg: dict[str, Any]) -> Any:
        """Run the operation once; return its report."""
        return Operation(self.indexes, behavior, arg).run_all().complete()

    def twice(self, behavior: Any, arg: dict[str, Any], rng: random.Random) -> Any:
        """Run each job two or three times, keep one of the results, run the completion twice; return the report."""
        operation = Operation(self.indexes, behavior, arg)
        for partition in operation.planned.partitions:
            results = []
            for fence in range(1, rng.randint(2, 3) + 1):
                ctx = operation.attempt(partition, fence)
                ctx.stop_after = rng.choice([-1, 0, 1, 2]) if fence == 1 else -1
                if is_cancelled(lambda ctx=ctx, partition=partition: operation.run(partition, ctx)):  # type: ignore[misc]
                    continue
                results.append(operation.outcomes[partition.partition])
            assert len({str(_without_journal(result.result)) for result in results}) == 1
            operation.outcomes[partition.partition] = rng.choice(results)
        reports = [operation.complete() for _ in range(2)]
        assert reports[0] == reports[1]
        return reports[0]

    def state(self, keys: list[tuple[Any, ...]]) -> Any:
        """The content of the index by file names, and the files that a lookup of each key finds."""
        current = self.folder.current()
        if current is None:
            with pytest.raises(NotFound):
                find(self.indexes.record, "i", [])
            return None
        assert current.files is not None
        files = pq.read_table(data_of(self.folder) / current.files.name, partitioning=None)
        paths = dict(zip(files.column("file").to_pylist(), files.column("path").to_pylist(), strict=True))
        runs = [pq.read_table(data_of(self.folder) / run.name, partitioning=None) for run in current.runs]
        rows = [row for run in runs for row in run.to_pylist()]
        # Postings of removed files stay until there are many.
        postings = sorted((r["key"], paths[r["file"]], r["block"]) for r in rows if r["file"] in paths)
        listed = files.drop_columns(["file"]).to_pylist()
        facts = (current.kind, current.columns, current.options, current.families, sorted(current.schema))
        return facts, sorted(map(str, listed)), postings, [self._found(key) for key in keys]

    def _found(self, key: tuple[Any, ...]) -> Any:
        found = find(self.indexes.record, "i", [key if len(key) > 1 else key[0]])
        return sorted(_names(found.named, self.table)), sorted(_names(found.uncovered, self.table))

    def rows(self) -> dict[str, bytes]:
        """The table's own files."""
        return {path: data for path, data in bytes_below(self.table).items() if not path.startswith("_distop/")}


def _names(files: Any, table: Path) -> list[str]:
    return [str(Path(file[0]).relative_to(table)) for file in files]


def _without_journal(result: Any) -> Any:
    """The result without the fields that depend on the path of the attempt's journal."""
    return {name: value for name, value in result.items() if name not in ("journal", "digest", "bytes")}


def _comparable(report: Any) -> Any:
    """The report without generation numbers, which a second operation may increase, and without the table's version."""
    values = report if isinstance(report, dict) else report.model_dump(mode="json")
    return {name: value for name, value in values.items() if name not in ("generation", "table_version", "bytes")}


def _changed(worlds: list[World], pool: list[Path], rng: random.Random) -> None:
    """Add, replace or remove a file, the same in all worlds."""
    files = sorted(path for path in worlds[0].rows() if path.endswith(".parquet"))
    taken, name = rng.choice(pool), f"p=0/more-{rng.randrange(10**6)}.parquet"
    what = rng.choice(["add", "replace", "remove", "nothing"])
    if what in ("replace", "remove") and len(files) > 1:
        name = rng.choice(files)
    for world in worlds:
        path = world.table / name
        if what in ("replace", "remove"):
            path.unlink(missing_ok=True)
        if what in ("add", "replace"):
            path.parent.mkdir(exist_ok=True)
            shutil.copy2(taken, path)


@pytest.mark.parametrize("seed", SEEDS)
def test_repeated_operations_change_nothing_in_a_random_history(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One world runs it once; in the other each job and each completion runs twice, and then the operation.

    Both have the same state after each step; a repeated incremental operation changes no byte; and there are only
    files that a generation names.
    """
    print(f"the history of seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(segments, "SEGMENT_FILES", rng.choice([1, 2, 256]))
    pool = [Path(path) for files in generate(seed + 1000, tmp_path / "pool").rows.values() for path in files]
    made = generate(seed, tmp_path / "source")
    values = [row for files in made.rows.values() for rows in files.values() for row in rows]
    worlds = [World(made.directory, tmp_path / name) for name in ("once", "twice")]
    one, two = worlds
    columns = rng.sample(COLUMNS, rng.choice([1, 1, 2]))
    kind = rng.choice(["posting", "skip"])
    for _ in range(STEPS):
        _changed(worlds, pool, rng)
        rows = two.rows()
        dropped = rng.random() < 0.2
        refresh = rng.choice(["incremental", "incremental", "full"])
        arg = {"name": "i"} if dropped else {"name": "i", "columns": columns, "kind": kind, "refresh": refresh}
        behavior: Any = DropIndex() if dropped else BuildIndex()
        reports = [one.once(behavior, arg), two.twice(behavior, arg, rng)]
        assert _comparable(reports[0]) == _comparable(reports[1])
        keys = [tuple(row[name] for name in columns) for row in rng.sample(values, min(len(values), 5))]
        state = one.state(keys)
        assert two.state(keys) == state
        assert two.indexes.orphan_files() == []
        before = bytes_below(root_of(two.folder))
        again = _comparable(two.twice(behavior, arg, rng))
        assert two.state(keys) == state
        if dropped:
            assert again == {"name": "i", "dropped": False}
        elif refresh == "incremental":
            assert again == {**_comparable(reports[1]), "indexed": 0, "removed": 0}
        if refresh == "incremental" or dropped:
            assert bytes_below(root_of(two.folder)) == before
        assert two.indexes.orphan_files() == []
        assert two.rows() == rows
