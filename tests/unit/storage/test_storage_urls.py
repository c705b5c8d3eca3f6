"""URLs in data may name a bucket and a path, but no host, identity or role."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import InvalidArgument
from distop.protocol.plan import PartitionPlan, Pinned
from distop.protocol.records import TableRecord
from distop.storage.deletion import Place
from distop.storage.files import open_filesystem, read
from distop.storage.opened_stores import store_of
from distop.storage.storage_urls import HOSTS, check_paths, check_place, holds_secret
from distop.tables import check_reachable, check_table, plan_table
from distop.tables.iceberg.avro import ManifestIO
from distop.tables.iceberg.bounded_io import BoundedIO
from distop.tables.iceberg.metadata_file import read_metadata
from distop.tables.reading.file_facts import ddl
from distop.worker.child_side.shared_files import with_files
from tests.support.refusing_store import RefusingStore

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = {
    "s3://bucket/t?endpoint_override=127.0.0.1%3A9": "has parameters, which could choose an endpoint",
    "s3://bucket/t?region=eu-west-1": "has parameters",
    "s3://bucket/t?scheme=http": "has parameters",
    "s3://bucket/t?role_arn=arn:aws:iam::1:role/other": "has parameters",
    "s3://bucket/t?allow_bucket_creation=true&allow_bucket_deletion=true": "has parameters",
    "s3://bucket/t#fragment": "has parameters",
    "s3a://bucket:80/t": "names the host or the account 'bucket:80'",
    "gs://bucket/t?endpoint_override=127.0.0.1": "has parameters",
    "gs://somebody@bucket/t": "names the host or the account",
    # Azure's client would log in to it with the token of this machine's identity.
    "abfs://container@account.example.com/t": "names the host or the account 'container@account.example.com'",
    "abfss://container@account.dfs.core.windows.net.example.com/t": "names the host or the account",
    "abfss://account.dfs.core.windows.net/c/t": "names the host or the account",
    "abfs://container@account.dfs.core.windows.net/t?enable_tls=false": "has parameters",
    "hdfs://namenode:8020/t": "names the host or the account",
    "hdfs://root@namenode/t": "names the host or the account",
    "hdfs:///t?kerb_ticket=/tmp/krb5cc_0": "has parameters",
    "http://169.254.169.254/latest": "has the scheme 'http', which is not known",
    "https://example.com/t": "has the scheme 'https'",
    "fsspec+http://example.com/t": r"has the scheme 'fsspec\+http'",
    "hf://datasets/t": "has the scheme 'hf'",
    "az://container/t": "has the scheme 'az', which names no account, .* write abfss://CONTAINER@ACCOUNT",
    "jar:https://example.com/a.jar!/t": "has the scheme 'jar:https'",
    " s3://bucket/t": "has the scheme ' s3'",
}
"""Each URL, and why it is refused."""


@pytest.mark.parametrize("url", HOSTILE)
def test_hole_2_a_url_in_a_record_cannot_choose_a_host_or_an_identity(url: str) -> None:
    for format_name in ("parquet", "iceberg", "delta", "spark"):
        table = TableRecord("t", format_name, url)
        for ask in (check_table, plan_table, check_reachable):
            with pytest.raises(InvalidArgument, match=f"the location of a table, .*, {HOSTILE[url]}"):
                ask(table)


@pytest.mark.parametrize("url", HOSTILE)
def test_hole_2_a_url_in_a_plan_a_file_list_or_metadata_cannot_choose_a_host(url: str, tmp_path: Path) -> None:
    shared, path = Place(str(tmp_path)), url if "?" in url or "#" in url else f"{url}/part-0.parquet"
    table = TableRecord("other", "parquet", "/other")
    store_of(shared).put_new("plans/t/sample/1/list.json", json.dumps([[path, 1, 1]]).encode())
    for partition in (
        PartitionPlan(0, "p", files=((path, 1, 1),)),
        PartitionPlan(0, "p", files_at="plans/t/sample/1/list.json"),
        PartitionPlan(0, "p", source=path),
        PartitionPlan(0, "p", folders={path: "k=1"}),
        PartitionPlan(0, "p", beside=(Pinned(table, files=(("/a", 1, 1), (path, 1, 1))),)),
    ):
        with pytest.raises(InvalidArgument, match=f"the path of a file, .*, {HOSTILE[url]}"):
            with_files(partition, shared, "t/sample/1")
    for ask in (open_filesystem, lambda url: read(url, 1), read_metadata, ManifestIO(None).new_input):
        with pytest.raises(InvalidArgument):
            ask(path)


@pytest.mark.parametrize("path", ["http:/example.com/a", "s3a:bucket/a", "jar:file:/a!/b", "C:/a"])
def test_a_path_that_hadoop_reads_as_a_url_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgument, match="is neither a local path nor a URL"):
        check_paths(("/fine", path))


@pytest.mark.parametrize("before", [" ", "\t", "\n"])
def test_hole_2_a_path_with_leading_white_space_is_not_opened(before: str, tmp_path: Path) -> None:
    """It did not count as a local path, so another user's link was followed."""
    (tmp_path / "v1.metadata.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="its readers may resolve it differently"):
        BoundedIO().new_input(f"{before}file://{tmp_path}/v1.metadata.json")


def test_a_valid_url_without_a_path_does_not_make_other_urls_valid() -> None:
    with pytest.raises(InvalidArgument, match="has the scheme 'http'"):
        check_paths(("abfs://a@b.dfs.core.windows.net", "http://127.0.0.1:9"))
    with pytest.raises(InvalidArgument, match="has the scheme 'http'"):
        check_paths(("s3://bucket", "http://127.0.0.1:9", "s3://bucket/a"))


@pytest.mark.parametrize(
    "path", ["../../etc/list.json", "plans/../../list.json", "/etc/list.json", "results/t/sample/1/list.json"]
)
def test_a_plan_cannot_name_a_file_list_outside_of_the_plans(path: str, tmp_path: Path) -> None:
    store_of(Place(str(tmp_path))).put_new("list.json", b"[]")
    with pytest.raises(InvalidArgument, match="not a file list of this operation"):
        with_files(PartitionPlan(0, "p", files_at=path), Place(str(tmp_path / "shared")), "t/sample/1")


@pytest.mark.parametrize(
    "place",
    [
        *("s3://bucket/t", "s3a://my.bucket-1/a b/k=%3A", "gs://bucket/t", "gs://anonymous@bucket/t", "hdfs:///t"),
        *("abfss://container@account.dfs.core.windows.net/t", "wasbs://$web@account.blob.core.windows.net/t"),
        *("/data/a?b#c", "file:///data/a?b", "file:/data/a", "data@home/s3://k:s@b", "sales.orders"),
    ],
)
def test_a_place_that_names_no_host_is_allowed(place: str) -> None:
    check_place("the location", place)
    if place != "data@home/s3://k:s@b":
        check_paths((place,))


def test_hosts_are_allowed_by_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ("hdfs://nn:8020/t", "abfss://c@account.dfs.core.usgovcloudapi.net/t")
    for place in places:
        with pytest.raises(InvalidArgument, match="DISTOP_STORAGE_HOSTS"):
            check_place("the location", place)
    monkeypatch.setenv(HOSTS, "nn:8020, c@account.dfs.core.usgovcloudapi.net")
    for place in places:
        check_place("the location", place)
    with pytest.raises(InvalidArgument, match="DISTOP_STORAGE_HOSTS"):
        check_place("the location", "hdfs://nn:8021/t")


def test_the_endpoint_of_a_store_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with RefusingStore(files={"t/a.parquet": b"PAR1"}) as theirs, RefusingStore(files={}) as ours:
        ours.serve(monkeypatch)
        with pytest.raises(InvalidArgument, match="has parameters"):
            check_table(TableRecord("t", "parquet", f"s3://bucket/t?scheme=http&endpoint_override={theirs.url[7:]}"))
        assert (theirs.requests, ours.requests) == ([], [])
        with pytest.raises(InvalidArgument, match="does not exist"):
            check_table(TableRecord("t", "parquet", "s3://bucket/t"))
        assert theirs.requests == []
        assert ours.requests


@pytest.mark.parametrize("kind", ["int) , (SELECT 1", "int`", "int /* */", "", "decimal(1,2),x int"])
def test_a_type_in_a_plan_cannot_be_sql(kind: Any) -> None:
    with pytest.raises(ValueError, match="is not a Spark type"):
        ddl(("struct", (("a", ("array", kind)),)))
    assert ddl(("map", "string", "decimal(38, 3)")) == "map<string,decimal(38, 3)>"


def test_hole_9_long_paths_are_checked_in_linear_time() -> None:
    """A search that took quadratic time held all threads of a child for hours."""
    for path in ("s3://b/x?" + "pass" * 1_000_000, "s3://b/x#" + "key;" * 1_000_000, "/" + "x" * 5_000):
        assert not holds_secret(path)
        with pytest.raises(InvalidArgument, match="has over 4096 characters"):
            check_paths((path,))


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ("a=1&sig=x", True),
        ("sas = x", True),
        ("a=b?sig=x", True),
        ("a=sig=x", False),
        ("design=x", False),
        ("a=1;my-token=x", True),
        ("a=pass=x", True),
        ("pass;a=1", False),
        ("passport", False),
    ],
)
def test_a_secret_is_recognized_by_the_name_of_its_parameter(parameters: str, found: bool) -> None:
    assert holds_secret(f"s3://bucket/x?{parameters}") == found
