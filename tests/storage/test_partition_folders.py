"""Files of partitions of Spark's catalog in object stores: which ones are found, and by how many requests."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from distop.errors import InvalidArgument, TableRefused, TableUnavailable
from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.storage.storage_options import StorageOptions
from distop.tables.spark.partition_folders import PartitionFolders
from distop.tables.spark.spark_catalog import CatalogPartition, Described
from distop.tables.spark.spark_format import plan
from distop.tables.table_options import TableOptions
from tests.storage.conftest import S3
from tests.storage.faulty_http import FaultyProxy
from tests.storage.test_wrong_answers import listing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.storage.faulty_http import Seen
    from tests.storage.servers import Served

pytestmark = pytest.mark.timeout(300)

TREE = (
    *("a=1/f1.parquet", "a=1/_SUCCESS", "a=1/.f1.parquet.crc", "a=1/sub/f.parquet", "a=1/f2"),
    *("a=10/f1.parquet", "a=1-x/f1.parquet", "a=2/b=1/f.parquet", "a=2/b=1/c=1/f.parquet", "a=2/b=2/_hidden=1"),
    *("a=%3A/f 1+%2F.parquet", "a=é/f.parquet", "a=3/_temporary/f.parquet", "a=4/_SUCCESS", "a=5/f.parquet"),
    *("other/a=1/f.parquet", "_stage/a=1/f.parquet", "f.parquet", "a=6/empty.parquet", "a=7/f10", "a=7/f9"),
)
PARTITIONS = (
    *("a=1", "a=10", "a=1-x", "a=2/b=1", "a=2/b=1/c=1", "a=2/b=2", "a=%3A", "a=é", "a=4", "_stage/a=1", "a=6", "a=7"),
)
MISSING = ("a=3", "a=8", "a=", "a=1/f1.parquet/")


@pytest.mark.parametrize("served", S3, indirect=True)
@pytest.mark.parametrize("place", ["", "/data=1/t"])
def test_the_files_of_partitions_in_a_bucket_are_those_of_a_folder(
    served: Served, place: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    url, folder = f"{served.url}/{uuid.uuid4().hex}{place}", tmp_path / "t"
    store = open_store(url)
    for name in TREE:
        data = b"" if name.endswith("empty.parquet") else b"PAR1"
        store.put_new(name, data)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    def found(root: str) -> Mapping[str, Sequence[tuple[str, int]]]:
        places = {name: f"{root}/{name}" for name in PARTITIONS}
        folders = PartitionFolders(root, places.values(), lambda: None)
        return {
            name: [(path.removeprefix(root), size) for path, size, _ in folders.files(at)]
            for name, at in places.items()
        }

    proxy.seen.clear()
    remote = found(url)
    assert remote == found(str(folder))
    assert [path for path, _ in remote["a=7"]] == ["/a=7/f9", "/a=7/f10"]
    whole = [one.target for one in proxy.seen if "list-type=2" in one.target and "delimiter" not in one.target]
    assert len(whole) == 1


@pytest.fixture
def keys() -> list[str]:
    """The keys of the bucket that :func:`server` lists."""
    return []


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, keys: list[str]) -> Iterator[FaultyProxy]:
    """A bucket that can only be listed, by pages of 1,000 objects, as S3 does."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tester-secret")

    def answer(seen: Seen, forward: object) -> bytes:
        if "list-type=2" not in seen.target:
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        asked = {name: value for name, [value] in parse_qs(urlsplit(seen.target).query).items()}
        prefix = asked.get("prefix", "")
        after = asked.get("continuation-token") or asked.get("start-after", "")
        found = sorted(key for key in keys if key.startswith(prefix) and key > after)
        if "delimiter" in asked:
            found = [key for key in found if "/" not in key[len(prefix) :]]
        page = found[:1_000]
        return listing(*page, more=len(found) > len(page), token=page[-1] if page else "")

    with FaultyProxy(0) as found:
        found.fault = answer
        options = StorageOptions(
            endpoint=f"http://127.0.0.1:{found.port}", region="us-east-1", allow_http=True, time_limit=20.0
        )
        storage_options.configure({"s3://lake": options})
        yield found


def files_of(location: str, partitions: Collection[str]) -> Mapping[str, Sequence[str]]:
    """The names of files by partition."""
    folders = PartitionFolders(location, partitions, lambda: None)
    return {one: [path.removeprefix(f"{one}/") for path, _, _ in folders.files(one)] for one in partitions}


def test_partitions_below_the_table_are_listed_with_a_request_for_a_thousand_objects(
    keys: list[str], server: FaultyProxy
) -> None:
    keys += [f"t/k={n % 50}/{n}" for n in range(2_500)]
    found = files_of("s3://lake/t", [f"s3://lake/t/k={n}" for n in range(50)])
    assert {place: len(names) for place, names in found.items()} == {f"s3://lake/t/k={n}": 50 for n in range(50)}
    assert len(server.seen) == 3


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_a_whole_table_is_planned_with_one_request(scheme: str, keys: list[str], server: FaultyProxy) -> None:
    keys += [f"t/k={n}/f" for n in range(100)]
    partitions = [CatalogPartition({"k": str(n)}, f"{scheme}://lake/t/k={n}") for n in range(100)]
    columns = [{"name": name, "type": "long", "nullable": True, "metadata": {}} for name in ("id", "k")]
    described = Described("parquet", "s3a://lake/t", columns, ("k",), partitions)
    folders = PartitionFolders(described.location, [one.location for one in partitions], lambda: None)
    planned = plan(described, "db.t", TableOptions(), folders.files, lambda: None)
    assert [[path for path, _, _ in one.files] for one in planned.partitions] == [
        [f"{scheme}://lake/t/k={n}/f"] for n in range(100)
    ]
    assert len(server.seen) == 1


def test_partitions_elsewhere_are_listed_some_at_the_same_time(keys: list[str], server: FaultyProxy) -> None:
    keys += [f"{'t' if n % 2 else 'u'}/k={n}/f" for n in range(40)]
    answer, at_once, most = server.fault, [0], [0]
    lock, several = threading.Lock(), threading.Event()

    def counting(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            if at_once[0] > 1:
                several.set()
        if "prefix=u%2Fk%3D" in seen.target:
            several.wait(20)
        found = answer(seen, forward)
        with lock:
            at_once[0] -= 1
        return found

    server.fault = counting
    places = [f"s3://lake/{'t' if n % 2 else 'u'}/k={n}" for n in range(40)]
    assert files_of("s3://lake/t", places) == {place: ["f"] for place in places}
    assert several.is_set()
    assert most[0] <= 8
    assert len(server.seen) == 1 + 3 + 20  # the table; whether "u" is a table of another kind; its partitions


def test_folders_that_the_catalog_does_not_have_cost_few_requests(keys: list[str], server: FaultyProxy) -> None:
    keys += [f"t/k={k}/{n:05}" for k in range(3) for n in range(9_000)] + ["t/k=0-x/f", "t/z=1/f", "t/k=2a/f"]
    places = ["s3://lake/t/k=0-x", "s3://lake/t/k=2a", "s3://lake/t/z=1"]
    assert files_of("s3://lake/t", places) == {place: ["f"] for place in places}
    assert len(server.seen) <= 10


@pytest.mark.parametrize("place", ["", "a=1/", "a=1/b=1/"])
@pytest.mark.parametrize(
    ("sign", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "a Delta table"),
        (".hoodie/hoodie.properties", "a Hudi table"),
        ("metadata/v1.metadata.json", "an Iceberg table"),
    ],
)
def test_partitions_of_another_kind_of_table_are_refused(
    place: str, sign: str, kind: str, keys: list[str], server: FaultyProxy
) -> None:
    """Also if thousands of objects that do not matter are before the sign."""
    keys += [f"t/{place}{sign}", "t/a=1/b=1/f", *(f"t/+/{n}" for n in range(3_000))]
    keys += [f"t/{place}{sign.partition('/')[0]}/{n:04}" for n in range(2_000)]
    with pytest.raises(InvalidArgument, match=f"the location 's3://lake/t.*' (is|belongs to) {kind}: as|{kind}, which"):
        files_of("s3://lake/t", ["s3://lake/t/a=1/b=1"])


def test_other_tables_in_the_folder_do_not_matter(keys: list[str], server: FaultyProxy) -> None:
    keys += ["t/a=1/f", "t/old/_delta_log/0.json", "t/a=2/.hoodie/p", "t/a=1/metadata/notes.json", "t/x/a=3/f"]
    keys += ["t/_delta_log_of_old/0.json", "t/a=1/sub/_delta_log/0.json"]
    places = ["s3://lake/t/a=1", "s3://lake/t/x/a=3"]
    assert files_of("s3://lake/t", places) == {place: ["f"] for place in places}
    assert len(server.seen) == 1


@pytest.mark.parametrize("name", MISSING)
def test_a_partition_without_objects_is_an_error(name: str, keys: list[str], server: FaultyProxy) -> None:
    keys += [f"t/{key}" for key in TREE if "é" not in key]
    folders = PartitionFolders("s3://lake/t", ["s3://lake/t/a=1", f"s3://lake/t/{name}"], lambda: None)
    assert len(folders.files("s3://lake/t/a=1")) == 2
    with pytest.raises(TableUnavailable, match="does not exist"):
        folders.files(f"s3://lake/t/{name}")


def test_a_store_that_refuses_to_list_the_table(server: FaultyProxy) -> None:
    server.answer("403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>")
    with pytest.raises(TableRefused, match="the location 's3://lake/t' cannot be listed: .* status 403 AccessDenied"):
        PartitionFolders("s3://lake/t", ["s3://lake/t/k=1"], lambda: None)


@pytest.mark.parametrize("places", [["s3://lake/t/k=1"], [f"s3://lake/u/k={n}" for n in range(100)]])
def test_planning_can_be_stopped(places: Sequence[str], keys: list[str], server: FaultyProxy) -> None:
    keys += ["t/k=1/f"]

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PartitionFolders("s3://lake/t", places, stop)
    assert len(server.seen) < 50
