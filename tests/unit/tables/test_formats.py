"""Formats are found by entry points, and behaviors know readers but no formats."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import InvalidArgument, UsageError
from distop.protocol.plan import PartitionPlan
from distop.protocol.records import TableRecord
from distop.tables import changes_of, formats, reader_of, readers_of, record_at
from distop.tables.formats import ENTRY_POINTS, OWN, Format, format_of, names
from distop.tables.iceberg.iceberg_reader import IcebergReader
from distop.tables.parquet.parquet_reader import ParquetReader
from tests.support.behaviors import install

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
BEHAVIORS = ROOT / "behaviors"

SEAM = {
    "distop.tables",
    *("distop.tables.reader", "distop.tables.table_version", "distop.tables.reachability"),
    *(
        f"distop.tables.reading.{name}"
        for name in (
            *("file_facts", "row_counts", "spark_paths", "store_refusals", "table_folders"),
            "parquet_footers",  # its check that a file is the planned one
        )
    ),
    "distop.tables.catalog_entry",
    "distop.tables.expiration",
    *("distop.tables.partition_removal", "distop.tables.partition_condition"),
    *(f"distop.tables.reading.{name}" for name in ("arrow_rows", "arrow_types")),
    *("distop.tables.commits", "distop.tables.staged_files"),
}
"""Modules of distop.tables that behaviors may import: those that apply to all formats."""
CHANGES = {
    *("distop.tables.table_options", "distop.tables.spark.spark_catalog"),
    *(f"distop.tables.iceberg.iceberg_{name}" for name in ("format", "version", "changes", "fields", "rows", "jar")),
    *(f"distop.tables.iceberg.{name}" for name in ("metadata_file", "metadata_change", "staged_metadata")),
    "distop.tables.iceberg.written_folders",
    *(f"distop.tables.iceberg.{name}" for name in ("manifest_facts", "table_properties", "java_tables")),
    *(f"distop.tables.iceberg.{name}" for name in ("manifest_list", "snapshot_plan", "snapshot_checks")),
    *(
        f"distop.tables.iceberg.{name}"
        for name in ("new_metadata", "folder_publisher", "catalog_publisher", "staging_table")
    ),
    *(f"distop.tables.delta.{name}" for name in ("delta_log", "delta_version", "metadata_commit", "log_publisher")),
}
"""Further modules that ``apply`` imports: it changes tables of the two formats that can be changed.

Whether a table can be changed, the format decides (``changes_of``).
"""


def sources(*folders: str) -> list[Path]:
    found = sorted(path for folder in folders for path in (BEHAVIORS / folder).rglob("*.py"))
    assert found
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def of_tables(tree: ast.AST) -> Iterator[str]:
    """The imported modules of distop.tables, including those imported for types only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distop.tables"):
            package = ROOT / str(node.module).replace(".", "/")
            modules = {a.name for a in node.names if (package / f"{a.name}.py").exists()}
            yield from (f"{node.module}.{name}" for name in modules)
            if len(modules) < len(node.names):
                yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("distop.tables"))


def is_option(node: ast.AST) -> bool:
    """Whether a node looks up an option of a table."""
    found: Any = node.value if isinstance(node, ast.Subscript) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        found = node.func.value
    return isinstance(found, ast.Attribute) and found.attr == "options"


OTHERS = sorted({path.name for path in BEHAVIORS.iterdir() if path.is_dir()} - {"apply", "__pycache__"})


@pytest.mark.parametrize("path", sources(*OTHERS), ids=name_of)
def test_a_behavior_knows_readers_and_no_format(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert set(of_tables(tree)) - SEAM == set()
    asked = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "source")
        or (isinstance(node, ast.Constant) and node.value in OWN)
        or is_option(node)
    ]
    assert asked == [], "only a reader knows how the files of a plan are read"


@pytest.mark.parametrize("path", sources(*OTHERS), ids=name_of)
def test_the_source_of_a_behavior_names_no_format(path: Path) -> None:
    """An index may name Parquet, because it consists of Parquet files, and so may settings of Spark.

    Its keys are delta-encoded. An export and a purge have manifests of their own.
    """
    words = r"iceberg|\bdelta\b(?!-encoded)"
    words += "" if path.parent.name in {"export", "purge"} else "|manifest"
    words += "|parquet|footer" if path.parent.name == "validate" else ""
    assert re.findall(rf"(?i).*(?:{words}).*", path.read_text()) == []


@pytest.mark.parametrize("path", [path for path in sources("apply") if path.name != "schema_target.py"], ids=name_of)
def test_one_module_of_apply_asks_for_the_format(path: Path) -> None:
    asked = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "delta")
        or (isinstance(node, ast.Name) and node.id == "changes_of")
    ]
    assert asked == []


def test_the_modules_that_apply_imports_are_listed() -> None:
    found = {name for path in sources("apply") for name in of_tables(ast.parse(path.read_text()))}
    assert found - SEAM - CHANGES == set()
    assert CHANGES - found == set(), "apply does not import these any more"


def test_each_format_has_its_reader(tmp_path: Path) -> None:
    source = f"{tmp_path}/metadata/v1.metadata.json"
    file = (f"{tmp_path}/k=1/a.parquet", 1, 1)
    plain, through = PartitionPlan(0, "k=1", files=(file,)), PartitionPlan(0, "k=1", files=(file,), source=source)
    declared = {"columns": {"x": "bigint", "s": ["struct", [["a", "int"]]]}, "partition_types": {"k": "int"}}
    folder = reader_of(TableRecord("t", "parquet", str(tmp_path), {"partition_types": {"k": "int"}}), [plain])
    assert isinstance(folder, ParquetReader)
    assert (folder.columns(), dict(folder.partition_columns()), folder.moves) == (None, {"k": "int"}, False)
    assert (folder.values(file[0]), folder.partition_of(file[0])) == ({"k": "1"}, "k=1")
    catalog = reader_of(TableRecord("t", "spark", "d.t", declared), [plain])
    assert isinstance(catalog, ParquetReader)
    assert catalog.columns() == catalog.declared == {"x": "bigint", "s": ("struct", (("a", "int"),))}
    assert (dict(catalog.partition_columns()), catalog.moves) == ({"k": "int"}, True)
    for record in (TableRecord("t", "spark", "d.t"), TableRecord("t", "iceberg", str(tmp_path))):
        assert isinstance(reader_of(record, [through]), IcebergReader)
        assert dict(reader_of(record, [through]).partition_columns()) == {}
        with pytest.raises(InvalidArgument, match="the plan of 't'"):
            reader_of(record, [plain])


def test_plans_of_different_states_of_a_table_have_separate_readers(tmp_path: Path) -> None:
    record = TableRecord("t", "iceberg", str(tmp_path))
    plans = [PartitionPlan(n, str(n), source=f"{tmp_path}/metadata/v{n % 2}.metadata.json") for n in range(3)]
    assert [[plan.name for plan in mine] for _, mine in readers_of(record, plans)] == [["0", "2"], ["1"]]
    with pytest.raises(InvalidArgument, match="planned from different states"):
        reader_of(record, plans)


def test_the_format_of_a_folder_is_detected(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "i" / "metadata").mkdir(parents=True)
    (tmp_path / "i" / "metadata" / "v1.metadata.json").touch()
    (tmp_path / "d" / "_delta_log").mkdir(parents=True)
    (tmp_path / "d" / "_delta_log" / f"{0:020}.json").touch()
    assert [record_at(str(tmp_path / name)).format for name in ("p", "i", "d")] == ["parquet", "iceberg", "delta"]


def test_a_table_without_a_schema_cannot_be_changed() -> None:
    assert not changes_of(TableRecord("t", "iceberg", "/t")).by_catalog
    assert changes_of(TableRecord("t", "iceberg", "db.t", {"catalog": "prod"})).catalog is not None
    for record, why in (
        (TableRecord("t", "parquet", "/t"), "has no schema"),
        (TableRecord("t", "spark", "d.t"), "Spark"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            changes_of(record)


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
    install(folder, "some-formats", f"[{ENTRY_POINTS}]\n{lines}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(formats, "_installed", type(formats._installed)(16))


def test_a_format_is_found_by_the_name_of_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, csv="tests.acceptance.csv_format:FORMAT", odd="tests.acceptance.csv_format:TYPES")
    assert names() == ("parquet", "iceberg", "delta", "spark", "csv", "odd")
    assert isinstance(format_of(TableRecord("t", "csv", "/t")), Format)
    with pytest.raises(UsageError, match="the entry point 'odd' of distop.formats is .* which is not a Format"):
        format_of(TableRecord("t", "odd", "/t"))
    with pytest.raises(InvalidArgument, match=r"is not known \(known: parquet, iceberg, delta, spark, csv, odd\)"):
        format_of(TableRecord("t", "tests.acceptance.csv_format:FORMAT", "/t"))


@pytest.mark.parametrize("name", OWN)
def test_an_entry_point_does_not_replace_a_built_in_format(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = format_of(TableRecord("t", name, "/t"))
    installed(tmp_path, monkeypatch, **{name: "tests.acceptance.csv_format:FORMAT"})
    assert format_of(TableRecord("t", name, "/t")) is own
    assert names() == tuple(OWN)


def test_each_built_in_format_is_a_format(tmp_path: Path) -> None:
    found: list[Any] = [format_of(TableRecord("t", name, "/t")) for name in OWN]
    assert all(isinstance(one, Format) for one in found)
    assert [one.has_source(TableRecord("t", name, "/t")) for one, name in zip(found, OWN, strict=True)] == [
        *(False, True, True, True),
    ]
