"""Tries a bucket with obstore, pyarrow and Spark, and checks its conditional writes: ``distop doctor --storage``."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from distop.clock import uuid
from distop.errors import DistopError, describe
from distop.runtime import time_limit
from distop.services.doctor import Finding
from distop.storage import storage_options
from distop.storage.files import local_path
from distop.storage.opened_stores import open_store
from distop.storage.storage_access import storage_access_for
from distop.storage.store_check import CHECKS, CLOCK_TOLERANCE, WRITERS, check_store
from distop.storage.store_errors import StoreError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.storage.object_store import ObjectStore
    from distop.storage.storage_options import StorageOptions

_PYARROW = "distop.storage.pyarrow_trial:read"
_SPARK = "distop.worker.child_side.storage_trial:read"
_SPARK_SECONDS = 300.0
"""Time limit of the trial of Spark, which may fetch packages first."""
CALL_SECONDS = 20.0
"""Maximum time limit of a call of the store with its retries: a person waits for it."""
_CONTENT = b"written by distop doctor"


async def check_storage(
    url: str, options_by_prefix: Mapping[str, StorageOptions], spark_conf: Mapping[str, str] | None
) -> list[Finding]:
    """The findings about a URL or a local path. ``spark_conf``: Spark's settings; None: Spark is not tried.

    Raises InvalidArgument for a URL that is not allowed, and for settings that cannot be used.
    """
    storage_options.configure(options_by_prefix)
    store, local = open_store(url, limit=CALL_SECONDS), local_path(url) is not None
    findings = [_settings(url)]
    key = f"{CHECKS}/{uuid.uuid4().hex}/probe"
    connected = True

    def write() -> str:
        nonlocal connected
        try:
            return _write_and_read(store, key)
        except Unreachable:
            connected = False
            raise

    written = await _finding("folder" if local else "obstore", write)
    findings.append(written)
    try:
        if written.status == "ok":
            findings += await _others(url, key, options_by_prefix, spark_conf)
            findings += await _conditional_writes(store)
        else:
            skipped = "not tried, because obstore could not write a file for it"
            findings += [
                Finding(name, "skipped", skipped) for name in ("pyarrow", "spark reader", "conditional writes")
            ]
    finally:
        if connected:
            with suppress(StoreError, time_limit.TimeLimitExceeded):
                await time_limit.in_thread(lambda: store.delete_many([key]))
    return findings


def _settings(url: str) -> Finding:
    if local_path(url) is not None:
        return Finding("storage settings", "ok", "a local path needs none")
    access = storage_access_for(url)
    parts = [f"the bucket {access.bucket.prefix}"]
    parts += [f"at {access.options.endpoint}"] if access.options.endpoint else []
    parts += [f"in {access.region}"] if access.region else []
    if access.options.anonymous:
        parts.append("without credentials")
    elif access.profile is not None:
        parts.append(f"with the profile {access.profile.name}")
    return Finding("storage settings", "ok", " ".join(parts))


async def _finding(name: str, work: Callable[[], str]) -> Finding:
    """The finding of a trial in a thread."""
    try:
        return Finding(name, "ok", await time_limit.in_thread(work, limit=_SPARK_SECONDS))
    except time_limit.TimeLimitExceeded:
        return Finding(name, "error", f"no answer within {_SPARK_SECONDS:g} s")
    except DistopError as error:
        return Finding(name, "error", describe(error))


def _write_and_read(store: ObjectStore, key: str) -> str:
    store.put_new(key, _CONTENT)
    if store.get(key, limit=len(_CONTENT)).data != _CONTENT:
        raise StoreError(f"{store.location_of(key)} has another content than was written")
    if [found.key for found in store.list(key.rpartition("/")[0])] != [key]:
        raise StoreError(f"a listing does not show {store.location_of(key)}, which was written")
    return "writes, reads and lists files"


async def _others(
    url: str, key: str, options_by_prefix: Mapping[str, StorageOptions], spark_conf: Mapping[str, str] | None
) -> list[Finding]:
    if local_path(url) is not None:
        return []
    request = {"url": url, "key": key, "options": storage_options.as_given(options_by_prefix)}
    found = [await _tried("pyarrow", _PYARROW, request, time_limit.LIMIT)]
    if spark_conf is None:
        return [*found, Finding("spark reader", "skipped", "not tried (--no-spark)")]
    if find_spec("pyspark") is None:
        return [*found, Finding("spark reader", "skipped", "PySpark is not installed: only executors need it")]
    try:
        storage_access_for(url).spark()
    except DistopError as error:
        return [*found, Finding("spark reader", "skipped", describe(error))]
    request["spark_conf"] = dict(spark_conf)
    return [*found, await _tried("spark reader", _SPARK, request, _SPARK_SECONDS)]


async def _tried(name: str, function: str, request: Any, limit: float) -> Finding:
    """The finding of a trial in a process of its own, which reads what obstore has written."""
    try:
        size = await time_limit.in_process(function, request, limit)
    except time_limit.TimeLimitExceeded:
        return Finding(name, "error", f"no answer within {limit:g} s")
    except time_limit.Aborted as error:
        return Finding(name, "error", str(error))
    except DistopError as error:
        return Finding(name, "error", f"does not read what obstore has written: {describe(error)}")
    if size != len(_CONTENT):
        return Finding(name, "error", f"reads {size} of the {len(_CONTENT)} bytes that obstore has written")
    return Finding(name, "ok", "reads what obstore has written")


async def _conditional_writes(store: ObjectStore) -> list[Finding]:
    try:
        report = await time_limit.in_thread(lambda: check_store(store), limit=_SPARK_SECONDS)
    except time_limit.TimeLimitExceeded:
        return [Finding("conditional writes", "error", f"no answer within {_SPARK_SECONDS:g} s")]
    except DistopError as error:
        return [Finding("conditional writes", "error", describe(error))]
    text = f"one of {WRITERS} writers wins, nothing is overwritten, and listings are current"
    if not report.suitable:
        text = f"the store is not safe, so distop writes nothing there: {'; '.join(report.defects)}; use another store"
    found = [Finding("conditional writes", "ok" if report.suitable else "error", text)]
    if abs(report.clock_offset) > CLOCK_TOLERANCE:
        side = "ahead of" if report.clock_offset > 0 else "behind"
        text = (
            f"the store's clock is about {abs(report.clock_offset):.0f} s {side} this machine's: set the clocks (NTP)"
        )
        return [*found, Finding("store clock", "warning", text)]
    return [*found, Finding("store clock", "ok", f"within {CLOCK_TOLERANCE:.0f} s of this machine's")]
