"""``export`` within a bucket, beside ``rclone copy`` and ``aws s3 cp`` if these programs are installed.

All let the store copy, eight objects at a time. The export runs in this process, without an executor and etcd; its
time includes planning, manifests and markers. The peers' times include the start of their programs, so the ratios are
too good for distop. The rows' names say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.common import Result, Row, median, report_progress
from distop.protocol.records import TableRecord
from distop.storage import export_targets, storage_options
from distop.storage.opened_stores import open_store
from distop_behaviors.export import file_copy
from tests.storage import servers
from tests.support.export_runs import ExportRun

AT_ONCE = 8
FOLDERS = 20
SIZES = {"small": (2_000, 10_000), "large": (20, 8_000_000)}
"""Numbers of objects, and their bytes: S3's clients copy larger ones in parts."""
TARGET = 1.15


def measure(result: Result, folder: Path, runs: int) -> None:
    """Each kind of objects, beside each program that is installed."""
    (folder / "gateway").mkdir()
    with servers.versitygw(folder / "gateway") as served:
        former = {name: os.environ.get(name) for name in served.environment}
        os.environ.update(served.environment)
        tables = served.options().items()
        file_copy.FILES_AT_ONCE = AT_ONCE
        storage_options.configure({prefix: replace(one, request_timeout=60.0) for prefix, one in tables})
        try:
            for kind, (count, size) in SIZES.items():
                _measure(result, served, folder, runs, kind, count, size)
        finally:
            export_targets.configure(())
            for name, value in former.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value


def _measure(result: Result, served: servers.Served, folder: Path, runs: int, kind: str, count: int, size: int) -> None:
    place = f"{served.url}/{uuid.uuid4().hex}"
    report_progress(f"maintenance: writing {count} objects of {size} bytes")
    original, data = open_store(f"{place}/t"), os.urandom(size)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda n: original.put_new(f"p={n % FOLDERS}/{n}.parquet", data), range(count)))
    export_targets.configure([f"{place}/out"])

    def export(target: str) -> None:
        run = ExportRun(TableRecord("t", "parquet", f"{place}/t"), target, folder)
        if not run.run().report["complete"]:
            raise RuntimeError("the export is not complete")

    works: dict[str, Callable[[str], None]] = {"distop": export}
    endpoint = f"http://127.0.0.1:{served.port}"
    if (rclone := shutil.which("rclone")) is not None:
        works["rclone copy"] = partial(_rclone, rclone, endpoint, f"{place}/t")
    if (aws := shutil.which("aws")) is not None:
        works["aws s3 cp"] = partial(_aws, aws, endpoint, f"{place}/t")
    times: dict[str, list[float]] = {name: [] for name in works}
    for n in range(1 + runs):
        for name, work in works.items():
            target = f"{place}/out/{name.partition(' ')[0]}-{n}"
            began = time.perf_counter()
            work(target)
            took = time.perf_counter() - began
            found = sum(one.key.endswith(".parquet") for one in open_store(target).list())
            if found != count:
                raise RuntimeError(f"{name} has copied {found} of {count} objects")
            if n:
                times[name].append(took)
    note = f"{count} objects of {size / 1e6:g} MB"
    result.samples |= {f"export in a bucket, in-process, {kind}: {name}": seconds for name, seconds in times.items()}
    ours = median(times["distop"])
    for name, seconds in times.items():
        if name != "distop":
            theirs = median(seconds)
            what = f"export in a bucket, in-process, {kind}, relative to {name} with its start"
            text = f"{ours:.2f} : {theirs:.2f} s; {note}"
            report_progress(f"maintenance: {what}: {text}")
            result.rows.append(Row(what, ours / theirs, "×", TARGET if name.startswith("rclone") else None, note=text))
    if len(works) == 1:
        report_progress("maintenance: neither rclone nor aws is installed: export in a bucket has no peer")


def _rclone(program: str, endpoint: str, source: str, target: str) -> None:
    settings = {"TYPE": "s3", "PROVIDER": "Other", "ENDPOINT": endpoint, "ENV_AUTH": "true", "REGION": "us-east-1"}
    environment = {**os.environ, **{f"RCLONE_CONFIG_STORE_{name}": value for name, value in settings.items()}}
    paths = [one.replace("s3://", "store:") for one in (source, target)]
    options = ["--transfers", str(AT_ONCE), "--checkers", str(AT_ONCE), "--config", os.devnull]
    subprocess.run([program, "copy", *paths, *options], check=True, env=environment)


def _aws(program: str, endpoint: str, source: str, target: str) -> None:
    command = [program, "s3", "cp", "--recursive", "--only-show-errors", "--endpoint-url", endpoint, source, target]
    subprocess.run(command, check=True, env={**os.environ, "AWS_DEFAULT_REGION": "us-east-1"})
