"""Checks etcd, this machine and the executors, with advice for each problem: ``distop doctor``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import EtcdRejected, describe
from distop.protocol.frozen import frozen
from distop.services.inspection.history_filters import Query
from distop.services.inspection.history_pages import ask
from distop.services.inspection.status import live_nodes
from distop.services.registered import tables

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.protocol.keys import Keys
    from distop.store.client import EtcdClient

_CLOCK_TOLERANCE = 5.0
_SHOWN = 5
_MEBIBYTE = 1024 * 1024
_QUOTA = 2048 * _MEBIBYTE
"""etcd's default quota."""
_NEARLY_FULL = 0.8
_ALARM_ADVICE = {
    "NOSPACE": "free space (`etcdctl compact REVISION`, `etcdctl defrag --cluster`), then `etcdctl alarm disarm`",
    "CORRUPT": "a member's data differ from those of the others: replace that member before you disarm the alarm",
}
_AT_ONCE = 20
"""Records in one read: a history record has up to a megabyte."""


@frozen
class Finding:
    """The result of one check. ``status``: ok, warning, error or skipped. ``short``: a shorter text for the table."""

    name: str
    status: str
    text: str
    short: str = ""


# ------------------------------------------------------------------ this machine


def check_machine() -> list[Finding]:
    """Check this machine's clock, Java and Spark."""
    return [_boot_clock(), _java(), _spark()]


def _boot_clock() -> Finding:
    try:
        time.boottime()
    except AttributeError:
        text = "this system has no CLOCK_BOOTTIME: run executors on Linux"
        return Finding("boot clock", "error", text)
    return Finding("boot clock", "ok", "CLOCK_BOOTTIME counts suspended time, as sessions need it")


def _java() -> Finding:
    from distop.runtime.java import judge

    judged = judge(os.environ)
    if judged.level == "error":
        return Finding("java", "warning", f"{judged.text}; only executors need it")
    return Finding("java", judged.level, judged.text)


def _spark() -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("pyspark")
    except PackageNotFoundError:
        return Finding("spark", "warning", "PySpark is not installed: only executors need it (pyspark 4.1)")
    if not found.startswith("4.1."):
        return Finding("spark", "warning", f"PySpark {found} is installed: distop is tested with 4.1 only")
    return Finding("spark", "ok", f"PySpark {found}")


# -------------------------------------------------------------------------- etcd


async def check_cluster(etcd: EtcdClient, keys: Keys) -> list[Finding]:
    """Check etcd, its users, the clocks, the executors and the keys. Raises EtcdUnavailable, PermissionDenied."""
    checks: dict[str, Callable[[EtcdClient, Keys], Awaitable[Finding | list[Finding]]]] = {
        "etcd": _version,
        "space": _space,
        "users": _authentication,
        "clock": _clock,
        "executors": _nodes,
        "writes": _writes,
        "keys": _keys,
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            found = await check(etcd, keys)
            findings += found if isinstance(found, list) else [found]
        except EtcdRejected as error:
            # A submitter's role may not read all tables (docs/security.md, Roles).
            text = f"etcd refuses this check's reads ({describe(error)}): run it with the role of a viewer"
            findings.append(Finding(name, "skipped", text))
    return findings


async def _version(etcd: EtcdClient, keys: Keys) -> Finding:
    judged, members = await etcd.judge_server()
    size = f", {members} member{'s' if members != 1 else ''}" if members else ""
    where = f"{etcd.transport.address}{size}"
    return Finding("etcd", judged.level, f"{where}: {judged.text}", f"{where}: {judged.brief}")


async def _space(etcd: EtcdClient, keys: Keys) -> Finding:
    try:
        alarms = await etcd.alarms()
    except EtcdRejected:
        return Finding("space", "skipped", "this etcd user may not list alarms")
    if alarms:
        texts = (f"etcd raises {alarm}: {_ALARM_ADVICE.get(alarm, 'see its logs')}" for alarm in alarms)
        return Finding("space", "error", "; ".join(texts))
    status = await etcd.status()
    return judge_space(status.db_size, status.db_size_quota)


def judge_space(size: int, quota: int) -> Finding:
    """The finding about etcd's database of ``size`` bytes with a ``quota`` of bytes.

    ``quota`` 0: unknown, since servers before 3.6 do not report it; the default is assumed.
    """
    limit = quota or _QUOTA
    held = f"the database has {size / _MEBIBYTE:,.1f} of {limit / _MEBIBYTE:,.0f} MiB"
    whose = "" if quota else " (etcd's default quota: this server does not report its own)"
    if size < _NEARLY_FULL * limit:
        return Finding("space", "ok", f"no alarm, {held}{whose}")
    return Finding(
        "space", "warning", f"{held}{whose}; a full etcd refuses writes: compact and defragment it, or raise its quota"
    )


async def _authentication(etcd: EtcdClient, keys: Keys) -> list[Finding]:
    from distop.store.connection_settings import plaintext_password_warning

    config = etcd.config
    user = config.username
    if not user and any(not endpoint.loopback for endpoint in config.members):
        text = "no etcd user is configured and etcd needs none: everyone who reaches etcd may read and write all keys"
        return [Finding("users", "warning", f"{text} (docs/security.md, Roles)")]
    if not user:
        return []
    if plain := plaintext_password_warning(config):
        return [Finding("users", "warning", plain)]
    if etcd.transport.users_off:
        text = (
            f"authentication is off: etcd did not check the password of {user!r}, and everyone who reaches etcd may "
            "read and write all keys (run `etcdctl auth enable`)"
        )
        return [Finding("users", "warning", text)]
    return [Finding("users", "ok", f"etcd authenticates this client as {user!r}")]


async def _clock(etcd: EtcdClient, keys: Keys) -> Finding:
    """Compare this machine's clock with etcd's, and with the times that executors have written."""
    from distop.protocol.json_codec import parse_time
    from distop.store import server_clock

    ahead, unknown = None, ""
    try:
        ahead = await server_clock.ahead(etcd.config, etcd.transport.address)
    except server_clock.ClockUnreadable as error:
        unknown = str(error)
    newest = await ask(etcd, keys, Query(limit=1))
    future = parse_time(str(newest[0].record.get("finished", ""))) - time.time() if newest else 0.0
    if ahead is not None and abs(ahead) > _CLOCK_TOLERANCE:
        where = f"about {abs(ahead):.0f} s {_side(ahead)} etcd's"
        return Finding("clock", "error", f"this machine's clock is {where}: set the clocks (NTP)")
    if future > _CLOCK_TOLERANCE:
        return Finding(
            "clock", "error", f"{newest[0].op} ended {future:.0f} s in the future of this clock: set the clocks (NTP)"
        )
    nodes = sorted((await live_nodes(etcd, keys)).values(), key=lambda node: node.executor)
    wrong = [node for node in nodes if node.clock]
    if wrong:
        named = sorted(f"{node.executor}'s is {abs(node.clock)} s {_side(node.clock)} etcd's" for node in wrong)
        return Finding("clock", "error", f"wrong clocks: {', '.join(named)}; set the clocks (NTP)")
    if blind := [f"{node.executor}'s ({node.clock_unknown})" for node in nodes if node.clock_unknown]:
        text = "the clocks of some executors cannot be compared with etcd's, so these delete no history by age"
        return Finding("clock", "warning", f"{text}: {', '.join(blind)}")
    if ahead is None:
        return Finding("clock", "skipped", f"this clock cannot be compared with etcd's: {unknown}")
    return Finding("clock", "ok", f"within {_CLOCK_TOLERANCE:.0f} s of etcd's")


def _side(ahead: float) -> str:
    return "ahead of" if ahead > 0 else "behind"


async def _nodes(etcd: EtcdClient, keys: Keys) -> Finding:
    from distop.protocol.executor_nodes import named, refusal

    live = await live_nodes(etcd, keys)
    if not live:
        return Finding("executors", "warning", "no executor is alive: start one with `distop executor`")
    types = sorted({name for node in live.values() for name in node.behaviors})
    slots = sum(node.slots for node in live.values())
    alive = f"{len(live)} alive with {slots} slots, for {', '.join(types) or 'no type'}"
    cannot = [
        f"{node.executor} cannot run {', '.join(sorted(lacks))}: {next(iter(lacks.values()))}"
        for node in sorted(live.values(), key=lambda node: node.executor)
        if (lacks := {**node.failing, **node.unable})
    ]
    cannot += [
        f"{node.executor} has {node.spark}" if node.spark.startswith("no ") else f"{node.executor}: {node.spark}"
        for node in sorted(live.values(), key=lambda node: node.executor)
        if node.spark
    ]
    registered = sorted(record.name for record in await tables(etcd, keys))
    unserved = [t for t in registered if all(refusal(node.serves, None, (t,)) for node in live.values())]
    cannot += [f"no live executor serves {named([table])}" for table in unserved[:_SHOWN]]
    cannot += [f"nor {len(unserved) - _SHOWN} more tables"] if len(unserved) > _SHOWN else []
    return Finding("executors", "warning" if cannot else "ok", "; ".join([alive, *cannot]))


async def _writes(etcd: EtcdClient, keys: Keys) -> Finding:
    """Find writes that etcd rejects as invalid, and that executors retry."""
    from distop.services.inspection.reasons import LIMITS

    live = sorted((await live_nodes(etcd, keys)).values(), key=lambda node: node.executor)
    refused = [f"{op} ({node.executor}): {text}" for node in live for op, text in sorted(node.refused.items())]
    if not refused:
        return Finding("writes", "ok", "etcd accepts all writes of the executors")
    more = sum(node.refused_more for node in live)
    return _wrong("writes", [f"etcd rejects a write of {one}" for one in refused], "", LIMITS, more)


async def _keys(etcd: EtcdClient, keys: Keys) -> list[Finding]:
    from distop.decide.orphan_keys import orphans
    from distop.protocol import record_reading
    from distop.protocol.txn import Get

    listing = await etcd.list(*keys.everything(), keys_only=True)
    found = [kv.key for kv in listing.kvs]
    wanted, unreadable = record_reading.to_check(keys, found), []
    for n in range(0, len(wanted), _AT_ONCE):
        answers = await etcd.read(*(Get(key) for key in wanted[n : n + _AT_ONCE]))
        unreadable += record_reading.unreadable(keys, [a.kv for a in answers if a.kv is not None])
    return [
        _wrong("keys", orphans(keys, found), f"{len(found)} keys, none orphaned"),
        _wrong("records", unreadable, f"{len(wanted)} records, all readable"),
    ]


def _wrong(name: str, wrong: list[str], fine: str, advice: str = "", unnamed: int = 0) -> Finding:
    """The finding of a check that found the problems ``wrong``, and ``unnamed`` more; ok if there are none."""
    if not wrong:
        return Finding(name, "ok", fine)
    left = max(0, len(wrong) - _SHOWN) + unnamed
    more = f"; and {left} more" if left else ""
    return Finding(name, "error", "; ".join(wrong[:_SHOWN]) + more + (f": {advice}" if advice else ""))
