"""docs/how-to/store-data-on-s3.md: its commands validate and change tables on S3 with an executor and its Spark."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.store.embedded import EmbeddedEtcd
from tests.storage import servers
from tests.storage.delta_tables import append
from tests.storage.faulty_http import FaultyProxy
from tests.storage.iceberg_tables import table_in
from tests.support import delta, s3_spark
from tests.support.contract import dump
from tests.support.daemons import SPARK, daemons
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.storage.servers import Served

PAGE = Path(__file__).parents[2] / "docs/how-to/store-data-on-s3.md"
SECRET = "a-secret-of-this-lake"

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400), pytest.mark.rotating]


@pytest.fixture
def lake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, FaultyProxy]]:
    """An object store and a proxy in front of it, which distop is configured for. Credentials: in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with servers.moto() as served, FaultyProxy(served.port) as found:
        storage_options.configure(served.options(found.port))
        yield served, found
    storage_options.configure({})


def command_lines() -> set[bytes]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add((process / "cmdline").read_bytes())
        except OSError:
            continue
    return found


def test_the_commands_of_the_page_run(lake: tuple[Served, FaultyProxy], tmp_path: Path) -> None:
    """One configuration serves registration, planning and Spark. The secret is only in the environment."""
    need(jar(), MAVEN)
    need(delta.jars(), delta.MAVEN)
    need(s3_spark.jars(), s3_spark.MAVEN)
    served, proxy = lake
    page = PAGE.read_text()
    settings = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    endpoint = f"http://127.0.0.1:{proxy.port}"
    settings = settings.replace("https://s3.example.com:9000", endpoint) + "allow_http = true\n"
    jars = ",".join(map(str, (jar(), *(delta.jars() or ()), *(s3_spark.jars() or ()))))
    settings += f'[spark-conf]\n"spark.jars" = "{jars}"\n'
    (tmp_path / "distop.toml").write_text(settings)
    [doctor, executor] = re.findall(
        r"^```sh\ndistop (--config distop.toml (?:doctor.*|executor))\n```$", page, re.MULTILINE
    )
    commands = "".join(re.findall(r"^```shell\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    data = io.BytesIO()
    pq.write_table(pa.table({"total": [1.5, 2.0]}), data)
    store = open_store(f"s3://{servers.BUCKET}")
    for day in (1, 2):
        store.put_new(f"orders/day={day}/a.parquet", data.getvalue())
    table_in(open_store(f"s3://{servers.BUCKET}/customers"), served.port, {"a": [1], "b": [1]}, {"a": [2], "b": [2]})
    append(f"s3://{servers.BUCKET}/products", served.port, pa.table({"id": [1, 2], "price": [0.5, 2.0]}))
    checked = subprocess.run(
        [sys.executable, "-m", "distop.cli", *doctor.split()],
        capture_output=True, text=True, check=False, timeout=200, cwd=tmp_path,
    )  # fmt: skip
    assert checked.returncode == 0, checked
    for check in ("storage settings", "obstore", "pyarrow", "spark reader", "conditional writes", "store clock"):
        assert re.search(rf"^{check} +ok ", checked.stdout, re.MULTILINE), checked
    assert executor == "--config distop.toml executor"
    config = ("--config", str(tmp_path / "distop.toml"))
    (tmp_path / "daemons").mkdir()
    with EmbeddedEtcd() as etcd, daemons(etcd.endpoint, tmp_path / "daemons") as group:
        group.start("ann", ttl=10, options=(*SPARK, *config))
        proxy.seen.clear()
        ran = subprocess.run(
            ["bash", "-c", f'set -e; distop() {{ "{sys.executable}" -m distop.cli "$@"; }}; {commands}'],
            capture_output=True, text=True, check=False, timeout=250, cwd=tmp_path,
            env={**os.environ, "DISTOP_ETCD": etcd.endpoint},
        )  # fmt: skip
        assert ran.returncode == 0, (ran, group.tails())
        assert not any(SECRET.encode() in line for line in command_lines())
        assert SECRET not in str(dump(etcd.endpoint))
        texts = [file.read_bytes() for file in (tmp_path / "daemons").rglob("*") if file.is_file()]
    assert not any(SECRET.encode() in text for text in texts)
    assert SECRET not in ran.stdout + ran.stderr
    names = {seen.target.partition("?")[0] for seen in proxy.seen if seen.method == "PUT"}
    assert any("/totals/" in name for name in names), names
    changed = json.loads(store.get("customers/metadata/v4.metadata.json", limit=1 << 20).data)["properties"]
    assert json.loads(changed["distop.applied"])["operation"] == "customers/apply/1"
    assert b"products/apply/1" in store.get("products/_delta_log/00000000000000000001.json", limit=1 << 20).data
    by_spark = {seen.target.partition("?")[0] for seen in proxy.seen if b"aws-sdk-java" in seen.whole}
    for folder in ("orders", "customers", "products"):
        assert any(f"/{folder}/" in target for target in by_spark), folder
