"""Exports a branch of a table of 10,000 small files: next, start, done.

Run it beside `distop dev --export-to FOLDER/exports`; see docs/how-to/export-branches.md.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.io import load_file_io
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import update_table_metadata
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import IntegerType, LongType, NestedField

import distop

ROWS = pyarrow.schema(
    [
        pyarrow.field("id", pyarrow.int64(), metadata={"PARQUET:field_id": "1"}),
        pyarrow.field("day", pyarrow.int32(), metadata={"PARQUET:field_id": "2"}),
    ]
)


class FolderTable(NoopCatalog):
    """An Iceberg table in a folder: each commit writes the next metadata file."""

    def __init__(self, folder: Path) -> None:
        super().__init__("folder")
        self.folder, self.version, self.io = folder, 0, load_file_io({}, str(folder))

    def create(self) -> Table:
        schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "day", IntegerType()))
        spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "day"))
        metadata = new_table_metadata(schema, spec, UNSORTED_SORT_ORDER, str(self.folder), {})
        table = Table(("orders",), metadata, self.write(metadata), self.io, self)
        with table.transaction() as transaction, transaction.update_snapshot().fast_append():
            pass  # a table needs a snapshot before it has other branches
        return table

    def write(self, metadata: Any) -> str:
        self.version += 1
        path = self.folder / "metadata" / f"v{self.version}.metadata.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        ToOutputFile.table_metadata(metadata, self.io.new_output(str(path)))
        (path.parent / "version-hint.text").write_text(str(self.version))
        return str(path)

    def commit_table(self, table: Table, requirements: Any, updates: Any) -> CommitTableResponse:
        metadata = update_table_metadata(table.metadata, updates)
        return CommitTableResponse(metadata=metadata, metadata_location=self.write(metadata))


def add_files(table: Table, branch: str, files: int, days: int, start: int = 0) -> None:
    """Commit small files to a branch, the same number in each of some folders."""
    folder, added = Path(table.metadata.location) / "data", list[DataFile]()
    for number in range(start, start + files):
        day = number % days
        path = folder / f"day={day}" / f"{number:06}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table([[number], [day]], schema=ROWS), path)
        file = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=str(path),
            file_format=FileFormat.PARQUET,
            partition=Record(day),
            record_count=1,
            file_size_in_bytes=path.stat().st_size,
        )
        file.spec_id = 0
        added.append(file)
    with table.transaction() as transaction, transaction.update_snapshot(branch=branch).fast_append() as append:
        for file in added:
            append.append_data_file(file)


def request(client: distop.Client, table: str, branch: str, exports: Path) -> distop.Operation:
    """Ask for an export of the branch as it will be when the export starts.

    While another export of the branch runs, the request waits for its end. A request that waits already is replaced.
    """
    arg = {"to": str(exports / branch), "version": branch}
    return client.start_operation("export", table, arg, on_duplicate="combine")


def check(target: Path) -> int:
    """Check the markers and manifests of a complete export; returns the number of its files."""
    root = json.loads((target / "_EXPORT.json").read_text())
    assert (target / "_SUCCESS").exists()
    for folder in root["folders"]:
        data = (target / folder["path"] / "_MANIFEST.json").read_bytes()
        assert hashlib.sha256(data).hexdigest() == folder["sha256"]
        assert (target / folder["path"] / "_SUCCESS").exists()
        for file in json.loads(data)["files"]:
            assert (target / file["path"]).stat().st_size == file["bytes"]
    return int(root["files"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--days", type=int, default=100, help="folders with files")
    options = parser.parse_args()
    folder, exports = options.folder.absolute(), options.folder.absolute() / "exports"
    table = FolderTable(folder / "orders").create()
    add_files(table, "etl", options.files, options.days)
    client = distop.connect()
    client.add_table(distop.TableRecord("orders", "iceberg", str(folder / "orders")), replace=True)

    # Start: the first request starts at once. Next: of the others, one export remains, of the newest state.
    requests = [request(client, "orders", "etl", exports)]
    for n in range(3):
        add_files(table, "etl", 10, options.days, options.files + 10 * n)
        requests.append(request(client, "orders", "etl", exports))
    started = list(dict.fromkeys(one.ref for one in requests))
    print(f"{len(requests)} requests became the exports {', '.join(map(str, started))}")

    # Done: the markers are there, and the root manifest last.
    last = requests[-1].wait(timeout=600).raise_for_state()
    print(
        f"{check(exports / 'etl')} files in {last.report['folders']} folders, {last.report['copied']['files']} copied"
    )

    # A missing source fails the export: its folder has no marker, and the whole has none.
    missing = folder / "orders" / "data" / "day=0" / "000000.parquet"
    missing.unlink()
    failed = client.start_operation("export", "orders", {"to": str(exports / "again"), "version": "etl"}).wait(600)
    marked = len(list((exports / "again").glob("data/*/_SUCCESS")))
    complete = (exports / "again" / "_EXPORT.json").exists()
    print(f"{failed.state}: {marked} of {options.days} folders are marked, complete: {complete}")
    print(failed.errors[0]["text"] if failed.errors else "")


if __name__ == "__main__":
    main()
