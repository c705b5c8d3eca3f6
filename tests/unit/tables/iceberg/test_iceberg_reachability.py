"""The files that an Iceberg table's metadata reach are those of Iceberg's own metadata tables, and no fewer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.records import TableRecord
from distop.tables import reachability_of
from distop.tables.reachability import DATA, DELETES, MANIFEST, MANIFEST_LIST, METADATA, STATISTICS, Unit, in_groups
from tests.support.evolving_tables import evolve
from tests.support.icebergrest import WAREHOUSE, RestCatalogServer, configure, sql_catalog
from tests.support.lake import Folder
from tests.support.table_files import LoggedFolder, on_disk, with_statistics
from tests.unit.tables.delta.test_deletion_vectors import with_vector
from tests.unit.tables.iceberg.test_tables_iceberg import BY_K, SCHEMA, record, rows

if TYPE_CHECKING:
    from pyiceberg.table import Table


def paths(table: TableRecord, *kinds: str, removed: bool = False) -> set[str]:
    found = [file.path for file in reachability_of(table).all_files(removed=removed) if file.kind in kinds]
    assert len(set(found)) == len(found)
    return set(found)


def check_inspected(table: Table, own: TableRecord) -> None:
    """Compare with what pyiceberg's metadata tables list."""
    inspect = table.inspect
    assert paths(own, DATA) == set(inspect.all_data_files()["file_path"].to_pylist())
    assert paths(own, DELETES) == set(inspect.all_delete_files()["file_path"].to_pylist())
    assert paths(own, MANIFEST) == set(inspect.all_manifests()["path"].to_pylist())
    assert paths(own, MANIFEST_LIST) == set(inspect.snapshots()["manifest_list"].to_pylist())


def test_amoro_1959_files_of_branches_tags_and_old_snapshots_are_reached(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_K)
    table.append(rows("a", "b"))
    table.manage_snapshots().create_tag(table.metadata.current_snapshot_id or 0, "kept").commit()
    table.overwrite(rows("c"))
    table.manage_snapshots().create_branch(table.metadata.current_snapshot_id or 0, "side").commit()
    table.append(rows("d"), branch="side")
    table.delete("k = 'c'")
    check_inspected(table, record(tmp_path))
    assert len(paths(record(tmp_path), DATA)) == 4
    found = reachability_of(record(tmp_path))
    assert {refs for version in found.versions() for refs in version.refs} == {"kept", "side", "main"}
    assert [v.time for v in found.versions()] == sorted(v.time or 0 for v in found.versions())
    assert found.place == str(tmp_path)


def test_iceberg_go_1842_statistics_files_are_reached(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA)
    table.append(rows("a"))
    table.append(rows("b"))
    first, last = (one.snapshot_id for one in table.metadata.snapshots)
    written = with_statistics(table, first, last)
    assert paths(record(tmp_path), STATISTICS) == set(written)
    found = reachability_of(record(tmp_path))
    assert {f.path for f in found.named({str(last)}) if f.kind == STATISTICS} == set(written[2:])


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_everything_in_the_folder_of_a_table_is_reached(tmp_path: Path, seed: int, version: int) -> None:
    made = evolve(seed, tmp_path / "t", version=version)
    check_inspected(made.table, TableRecord("t", "iceberg", str(made.path)))
    found = reachability_of(TableRecord("t", "iceberg", str(made.path)))
    old = {path for path in on_disk(made.path) if path.endswith(".metadata.json") and path != found.source}
    assert {file.path for file in found.all_files()} == on_disk(made.path) - old


def test_the_units_of_some_versions_are_their_manifests(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_K)
    table.append(rows("a", "b"))
    table.delete("k = 'a'")
    found = reachability_of(record(tmp_path))
    last = found.versions()[-1].id
    own = {unit.name for unit in found.units({last})}
    assert own == set(table.inspect.manifests()["path"].to_pylist()) < {unit.name for unit in found.units()}
    assert {f.path for f in found.named({last})} == {table.inspect.snapshots()["manifest_list"].to_pylist()[-1]}
    live = {f.path for unit in found.units({last}) for f in found.files(unit) if f.kind == DATA}
    every = {f.path for unit in found.units({last}) for f in found.files(unit, removed=True) if f.kind == DATA}
    assert live == set(table.inspect.files()["file_path"].to_pylist()) < every
    for unit in found.units():
        assert Unit.of_json(unit.to_json()) == unit
        assert unit.size == Path(unit.name).stat().st_size


def test_an_earlier_state_is_opened_by_its_source(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA)
    table.append(rows("a"))
    before = reachability_of(record(tmp_path))
    table.append(rows("b"))
    assert reachability_of(record(tmp_path)).source != before.source
    again = reachability_of(record(tmp_path), source=before.source)
    assert list(again.all_files()) == list(before.all_files())


def test_metadata_files_that_the_log_no_longer_has_are_its_history(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path).new(SCHEMA, **{"write.metadata.previous-versions-max": "2"})
    for _ in range(6):
        table.append(rows("a"))
    found = reachability_of(record(tmp_path))
    named = [file.path.rpartition("/")[2] for file in found.roots()]
    assert named == ["v5.metadata.json", "v6.metadata.json", "version-hint.text", "v7.metadata.json"]
    assert {f.path.rpartition("/")[2] for f in found.history()} == {f"v{n}.metadata.json" for n in (1, 2, 3, 4)}
    (tmp_path / "metadata" / "v3.metadata.json").unlink()
    left = {f.path.rpartition("/")[2] for f in reachability_of(record(tmp_path)).history()}
    assert left == {"v3.metadata.json", "v4.metadata.json"}


def test_deletion_vectors_in_puffin_files_are_delete_files(tmp_path: Path) -> None:
    with_vector(tmp_path / "t", 4, 40)
    own = TableRecord("t", "iceberg", str(tmp_path / "t"))
    assert paths(own, DELETES) == {str(tmp_path / "t" / "data" / "dv.puffin")}


@pytest.mark.parametrize("missing", ["-m0.avro", "snap-"])
def test_nothing_is_listed_if_a_file_of_the_metadata_is_missing(tmp_path: Path, missing: str) -> None:
    table = Folder(tmp_path).new(SCHEMA)
    table.append(rows("a"))
    table.append(rows("b"))
    next(p for p in sorted((tmp_path / "metadata").iterdir()) if missing in p.name).unlink()
    with pytest.raises(TableUnavailable, match="cannot read the metadata"):
        list(reachability_of(record(tmp_path)).all_files())


def test_a_data_file_of_another_table_is_refused(tmp_path: Path) -> None:
    """By a link in the table's folder, the metadata would name a file of another table."""
    table = Folder(tmp_path / "t").new(SCHEMA)
    table.append(rows("a"))
    (tmp_path / "t" / "data").rename(tmp_path / "other")
    (tmp_path / "t" / "data").symlink_to(tmp_path / "other")
    with pytest.raises(InvalidArgument, match="lies outside of its table"):
        list(reachability_of(record(tmp_path / "t")).all_files())


def test_a_table_without_snapshots_has_only_metadata(tmp_path: Path) -> None:
    Folder(tmp_path).new(SCHEMA)
    found = reachability_of(record(tmp_path))
    assert {file.kind for file in found.all_files()} == {METADATA}
    assert not found.versions()
    assert not list(found.units())


@pytest.mark.parametrize("kind", ["sql", "rest", "hadoop"])
def test_tables_of_catalogs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "hadoop":
        table: Table = LoggedFolder(tmp_path / "warehouse" / "db" / "t").new(SCHEMA)
        table.append(rows("a"))
        options = configure(monkeypatch, type="hadoop", warehouse=str(tmp_path / "warehouse"))
        own = TableRecord("t", "iceberg", "db.t", options)
        assert {f.path for f in reachability_of(own).all_files()} == on_disk(tmp_path / "warehouse")
        return
    catalog = sql_catalog(tmp_path)
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", SCHEMA)
    table.append(rows("a"))
    if kind == "sql":
        options = configure(monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/catalog.db")
        found = reachability_of(TableRecord("t", "iceberg", "db.t", options))
    else:
        with RestCatalogServer(tmp_path) as server:
            options = configure(monkeypatch, type="rest", uri=server.uri, warehouse=WAREHOUSE)
            found = reachability_of(TableRecord("t", "iceberg", "db.t", options))
    assert {f.path.removeprefix("file://") for f in found.all_files()} == on_disk(tmp_path / "warehouse")
    catalog.close()


def test_groups_of_units_are_limited_by_size_and_count() -> None:
    units = [Unit(str(n), MANIFEST, size) for n, size in enumerate((5, 5, 1, 20, 1, 1, 1))]
    groups = [[unit.size for unit in group] for group in in_groups(units, size=10, count=2)]
    assert groups == [[5, 5], [1], [20], [1, 1], [1]]
    assert list(in_groups([], size=1, count=1)) == []
