"""Tables on S3 are purged, and nothing beside them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from distop import testing
from distop.protocol.records import TableRecord
from distop.storage.opened_stores import open_store
from distop_behaviors.purge import Purge
from tests.storage.conftest import S3
from tests.storage.test_orphans_on_s3 import contents, new_table

if TYPE_CHECKING:
    from tests.storage.servers import Served

pytestmark = [pytest.mark.timeout(300)]


@pytest.mark.parametrize("served", S3, indirect=True)
@pytest.mark.parametrize("table_format", ["iceberg", "delta"])
def test_a_table_on_s3_is_purged(served: Served, table_format: str) -> None:
    bucket = f"{served.url}/{uuid.uuid4().hex}"
    new_table(table_format, f"{bucket}/t", served.port)
    reached = set(contents(bucket))
    for key in ("t2/left", "t/data/k=caf\u00e9 10%3A00/x y.parquet"):
        open_store(bucket).put_new(key, b"not of the table")
    # The bucket has another name in the record than in the metadata.
    table = TableRecord("lake", table_format, f"{bucket}/t".replace("s3:", "s3a:"))
    run = testing.run_operation(Purge, {}, table=table)
    assert (run.state, run.report["complete"], run.report["missing"]) == ("success", True, 0)
    assert run.report["deleted_digest"] == run.report["digest"]
    assert sum(one["files"] for one in run.report["deleted"].values()) == len(reached)
    assert set(contents(bucket)) == {"t2/left", "t/data/k=caf\u00e9 10%3A00/x y.parquet"}
