"""``distop doctor``: what could keep distop from working here, each with what to do about it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import typer

from distop.cli import output
from distop.cli.command_context import current
from distop.clock import time as clock
from distop.errors import DistopError, EtcdRejected, describe
from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.client.async_client import Client

_CLOCK_TOLERANCE = 5.0
_SHOWN = 5
_MEBIBYTE = 1024 * 1024
_QUOTA = 2048 * _MEBIBYTE
"""etcd's, where nothing else is set."""
_NEARLY_FULL = 0.8
_ALARM_ADVICE = {
    "NOSPACE": "free space (`etcdctl compact REVISION`, `etcdctl defrag --cluster`), then `etcdctl alarm disarm`",
    "CORRUPT": "a member's data differ from the others': replace that member, and do not disarm the alarm before",
}
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
    """Check etcd, this machine and the executors. Exits with 1 when something is wrong."""
    findings = [_settings(), _boot_clock(), _java(), _spark()]
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


def _settings() -> Finding:
    return Finding("settings", "warning" if current.file.ignored else "ok", current.file.text)


def _boot_clock() -> Finding:
    if hasattr(time, "CLOCK_BOOTTIME"):
        return Finding("boot clock", "ok", "CLOCK_BOOTTIME counts suspended time, as sessions need it")
    return Finding("boot clock", "error", "there is no CLOCK_BOOTTIME: executors need Linux to know their deadline")


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
        return Finding("spark", "warning", f"PySpark {found} is installed, distop is made for 4.1")
    return Finding("spark", "ok", f"PySpark {found}")


# -------------------------------------------------------------------------- etcd


async def _store(client: Client) -> list[Finding]:
    checks: dict[str, Callable[[Client], Awaitable[Finding | list[Finding]]]] = {
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
            found = await check(client)
            findings += found if isinstance(found, list) else [found]
        except EtcdRejected as error:
            # A submitter's role has no range over all tables (docs/security.md, Roles).
            text = f"etcd refuses what this check reads ({describe(error)}): a viewer may run it"
            findings.append(Finding(name, "skipped", text))
    return findings


async def _version(client: Client) -> Finding:
    judged, members = await client.etcd.judge_server()
    size = f", {members} member{'s' if members != 1 else ''}" if members else ""
    where = f"{client.etcd.transport.address}{size}"
    return Finding("etcd", judged.level, f"{where}: {judged.text}", f"{where}: {judged.brief}")


async def _space(client: Client) -> Finding:
    try:
        alarms = await client.etcd.alarms()
    except EtcdRejected:
        return Finding("space", "skipped", "our etcd user may not ask for alarms")
    if alarms:
        told = (f"etcd raises {alarm}: {_ALARM_ADVICE.get(alarm, 'see its logs')}" for alarm in alarms)
        return Finding("space", "error", "; ".join(told))
    status = await client.etcd.status()
    return judge_space(status.db_size, status.db_size_quota)


def judge_space(size: int, quota: int) -> Finding:
    """etcd's database has ``size`` bytes, and may have ``quota``; 0: the server does not tell (before 3.6), and has the
    default unless somebody gave it another.
    """
    limit = quota or _QUOTA
    held = f"the database has {size / _MEBIBYTE:,.1f} of {limit / _MEBIBYTE:,.0f} MiB"
    whose = "" if quota else " (etcd's default quota: this server does not tell its own)"
    if size < _NEARLY_FULL * limit:
        return Finding("space", "ok", f"no alarm, {held}{whose}")
    return Finding(
        "space",
        "warning",
        f"{held}{whose}, and then etcd takes no more writes: compact and defragment it, or raise its quota",
    )


async def _authentication(client: Client) -> list[Finding]:
    from distop.store.connection_settings import password_in_plain

    etcd = client.config.etcd
    user = etcd.username
    if not user and any(not endpoint.loopback for endpoint in etcd.members):
        text = "no etcd user is configured, and etcd asks for none: whoever reaches etcd may read and write everything"
        return [Finding("users", "warning", f"{text} (docs/security.md, Roles)")]
    if not user:
        return []
    if plain := password_in_plain(etcd):
        return [Finding("users", "warning", plain)]
    if client.etcd.transport.users_off:
        text = (
            f"authentication is off: etcd did not look at the password of {user!r}, and everybody who reaches it may "
            "read and write everything (`etcdctl auth enable`)"
        )
        return [Finding("users", "warning", text)]
    return [Finding("users", "ok", f"etcd knows us as {user!r}")]


async def _clock(client: Client) -> Finding:
    """Compared with the clock of the member in use, and with what executors have written by theirs."""
    from distop.protocol.json_codec import parse_time
    from distop.store import server_clock

    ahead, unknown = None, ""
    try:
        ahead = await server_clock.ahead(client.config.etcd, client.etcd.transport.address)
    except server_clock.Untold as error:
        unknown = str(error)
    newest = await client.history(limit=1)
    future = parse_time(str(newest[0].record.get("finished", ""))) - clock.time() if newest else 0.0
    if ahead is not None and abs(ahead) > _CLOCK_TOLERANCE:
        where = f"about {abs(ahead):.0f} s {_side(ahead)} etcd's"
        return Finding("clock", "error", f"this machine's clock is {where}: set the clocks (NTP)")
    if future > _CLOCK_TOLERANCE:
        return Finding(
            "clock", "error", f"{newest[0].op} ended {future:.0f} s in this machine's future: set the clocks (NTP)"
        )
    nodes = sorted((await client.nodes()).values(), key=lambda node: node.executor)
    wrong = [node for node in nodes if node.clock]
    if wrong:
        named = sorted(f"{node.executor}'s is {abs(node.clock)} s {_side(node.clock)} etcd's" for node in wrong)
        return Finding("clock", "error", f"wrong clocks: {', '.join(named)}; set the clocks (NTP)")
    if blind := [f"{node.executor}'s ({node.clock_unknown})" for node in nodes if node.clock_unknown]:
        text = "clocks of executors that cannot be compared with etcd's, so that these delete no history by age"
        return Finding("clock", "warning", f"{text}: {', '.join(blind)}")
    if ahead is None:
        return Finding("clock", "skipped", f"it could not be compared with etcd's: {unknown}")
    return Finding("clock", "ok", f"within {_CLOCK_TOLERANCE:.0f} s of etcd's")


def _side(ahead: float) -> str:
    return "ahead of" if ahead > 0 else "behind"


async def _nodes(client: Client) -> Finding:
    from distop.protocol.executor_nodes import named, refusal

    live = await client.nodes()
    if not live:
        return Finding("executors", "warning", "none is alive: start one with `distop executor`")
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
    registered = sorted(record.name for record in await client.tables())
    unserved = [t for t in registered if all(refusal(node.serves, None, (t,)) for node in live.values())]
    cannot += [f"no live executor serves {named([table])}" for table in unserved[:_SHOWN]]
    cannot += [f"nor {len(unserved) - _SHOWN} more"] if len(unserved) > _SHOWN else []
    return Finding("executors", "warning" if cannot else "ok", "; ".join([alive, *cannot]))


async def _writes(client: Client) -> Finding:
    """Writes that etcd rejects as invalid, and that executors keep retrying."""
    from distop.services.inspection.reasons import LIMITS

    live = sorted((await client.nodes()).values(), key=lambda node: node.executor)
    refused = [f"{op} ({node.executor}): {text}" for node in live for op, text in sorted(node.refused.items())]
    if not refused:
        return Finding("writes", "ok", "etcd accepts all writes of the executors")
    more = sum(node.refused_more for node in live)
    return _wrong("writes", [f"etcd rejects a write of {one}" for one in refused], "", LIMITS, more)


async def _keys(client: Client) -> list[Finding]:
    from distop.decide.orphan_keys import orphans
    from distop.protocol import record_reading
    from distop.protocol.txn import Get

    listing = await client.etcd.list(*client.keys.everything(), keys_only=True)
    found = [kv.key for kv in listing.kvs]
    wanted, unreadable = record_reading.to_check(client.keys, found), []
    for n in range(0, len(wanted), _AT_ONCE):
        answers = await client.etcd.read(*(Get(key) for key in wanted[n : n + _AT_ONCE]))
        unreadable += record_reading.unreadable(client.keys, [a.kv for a in answers if a.kv is not None])
    return [
        _wrong("keys", orphans(client.keys, found), f"{len(found)} keys, none orphaned"),
        _wrong("records", unreadable, f"{len(wanted)} records, all readable"),
    ]


def _wrong(name: str, wrong: list[str], fine: str, advice: str = "", unnamed: int = 0) -> Finding:
    """``unnamed``: how many more are wrong than ``wrong`` names."""
    if not wrong:
        return Finding(name, "ok", fine)
    left = max(0, len(wrong) - _SHOWN) + unnamed
    more = f"; and {left} more" if left else ""
    return Finding(name, "error", "; ".join(wrong[:_SHOWN]) + more + (f": {advice}" if advice else ""))
