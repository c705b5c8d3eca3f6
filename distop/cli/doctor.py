"""``distop doctor``: what could keep distop from working here, each with what to do about it."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

import typer

from distop.cli import output
from distop.cli.context import current
from distop.core.frozen import frozen
from distop.errors import DistopError, describe

if TYPE_CHECKING:
    from distop.client import Client

_CLOCK_TOLERANCE = 5.0
_SHOWN = 5
_AT_ONCE = 20
"""Records in one answer: a history record has up to a megabyte."""


@frozen
class Finding:
    """``status``: ok, warning (works, with a word), error (something is wrong) or skipped. ``short``: for people, where
    ``text`` says more than a line of theirs holds.
    """

    name: str
    status: str
    text: str
    short: str = ""


def doctor() -> None:
    """Check etcd, the clock, Java, Spark, executors and leftover keys. Exits with 1 when something is wrong."""
    findings = [_boot_clock(), _java(), _spark()]
    unreachable = 0
    try:
        findings = [*current.with_client(_store), *findings]
    except DistopError as error:
        if error.exit_code == 2:
            raise
        unreachable = error.exit_code
        findings.insert(0, Finding("etcd", "error", describe(error)))
    wrong = any(finding.status == "error" for finding in findings)
    if current.json:
        checks = [{"name": f.name, "status": f.status, "text": f.text} for f in findings]
        output.write_json({"ok": not wrong, "checks": checks})
    else:
        output.table(("check", "status", "what"), [(f.name, f.status, f.short or f.text) for f in findings], "")
    if wrong:
        raise typer.Exit(unreachable or 1)


# ------------------------------------------------------------------ this machine


def _boot_clock() -> Finding:
    if hasattr(time, "CLOCK_BOOTTIME"):
        return Finding("boot clock", "ok", "CLOCK_BOOTTIME counts suspended time, as sessions need it")
    return Finding("boot clock", "error", "there is no CLOCK_BOOTTIME: executors need Linux to know their deadline")


def _java() -> Finding:
    from distop.java import judge

    judged = judge(os.environ)
    return Finding("java", judged.level, judged.text)


def _spark() -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("pyspark")
    except PackageNotFoundError:
        return Finding("spark", "error", "PySpark is not installed: executors need pyspark 4.1")
    if not found.startswith("4.1."):
        return Finding("spark", "warning", f"PySpark {found} is installed, distop is made for 4.1")
    return Finding("spark", "ok", f"PySpark {found}")


# -------------------------------------------------------------------------- etcd


async def _store(client: Client) -> list[Finding]:
    return [
        await _version(client),
        await _space(client),
        await _clock(client),
        await _nodes(client),
        *await _keys(client),
    ]


async def _version(client: Client) -> Finding:
    from distop.core.versions import judge_etcd
    from distop.errors import EtcdRejected

    status = await client.etcd.status()
    try:
        members = len(await client.etcd.members())
    except EtcdRejected:
        members = 0
    judged = judge_etcd(status.version, members)
    size = f", {members} member{'s' if members != 1 else ''}" if members else ""
    where = f"{status.endpoint}{size}"
    return Finding("etcd", judged.level, f"{where}: {judged.text}", f"{where}: {_brief(judged.text)}")


def _brief(text: str) -> str:
    """A judgement of etcd's version without its list of defects and their numbers."""
    return re.sub(r" \(known defects: (?:[^()]|\([^()]*\))*\)| \(#[0-9]+\)", "", text)


async def _space(client: Client) -> Finding:
    from distop.errors import EtcdRejected

    try:
        alarms = await client.etcd.alarms()
    except EtcdRejected:
        return Finding("space", "skipped", "our etcd user may not ask for alarms")
    if alarms:
        return Finding(
            "space",
            "error",
            f"etcd raises {', '.join(alarms)}: compact, defragment and disarm it (`etcdctl alarm disarm`)",
        )
    status = await client.etcd.status()
    mebibytes = status.db_size / 1024 / 1024
    return Finding("space", "ok", f"no alarm, the database has {mebibytes:.1f} MiB")


async def _clock(client: Client) -> Finding:
    """etcd has no clock to ask; what can be told is that ours does not stand before what others have written."""
    from distop.core.decide import parse_time

    newest = await client.history(limit=1)
    if not newest:
        return Finding("clock", "ok", "nothing has ended yet that this machine's clock could be compared with")
    ahead = parse_time(str(newest[0].record.get("finished", ""))) - time.time()
    if ahead > _CLOCK_TOLERANCE:
        return Finding(
            "clock", "error", f"{newest[0].op} ended {ahead:.0f} s in this machine's future: set the clocks (NTP)"
        )
    return Finding("clock", "ok", "not before the newest history record")


async def _nodes(client: Client) -> Finding:
    live = await client.nodes()
    if not live:
        return Finding("executors", "warning", "none is alive: start one with `distop executor`")
    types = sorted({name for node in live.values() for name in node.behaviors})
    slots = sum(node.slots for node in live.values())
    alive = f"{len(live)} alive with {slots} slots, for {', '.join(types) or 'no type'}"
    cannot = [
        f"{node.executor} cannot run {', '.join(sorted(node.unable))}: {next(iter(node.unable.values()))}"
        for node in sorted(live.values(), key=lambda node: node.executor)
        if node.unable
    ]
    return Finding("executors", "warning" if cannot else "ok", "; ".join([alive, *cannot]))


async def _keys(client: Client) -> list[Finding]:
    from distop.core import records
    from distop.core.orphans import orphans
    from distop.core.txn import Get

    listing = await client.etcd.list(*client.keys.everything(), keys_only=True)
    found = [kv.key for kv in listing.kvs]
    wanted, unreadable = records.to_check(client.keys, found), []
    for n in range(0, len(wanted), _AT_ONCE):
        answers = await client.etcd.read(*(Get(key) for key in wanted[n : n + _AT_ONCE]))
        unreadable += records.unreadable(client.keys, [a.kv for a in answers if a.kv is not None])
    return [
        _wrong("keys", orphans(client.keys, found), f"{len(found)} keys, none orphaned"),
        _wrong("records", unreadable, f"{len(wanted)} records, all readable"),
    ]


def _wrong(name: str, wrong: list[str], fine: str) -> Finding:
    if not wrong:
        return Finding(name, "ok", fine)
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return Finding(name, "error", "; ".join(wrong[:_SHOWN]) + more)
