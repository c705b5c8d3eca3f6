"""Check etcd's history against the contract, without code of ``distop audit``.

Reads the history with ``etcdctl watch`` from the first revision on. Exit code 0: no violation; 1: violations, which
are printed; 3: the history cannot be read, or its first revisions are compacted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from auditing.auditor import SecondAuditor
from auditing.follower import SecondFollower

ASK = 30.0
"""Time limit in seconds for one request to etcd."""
LOOK = 0.1
"""Seconds between two checks of the audit's progress."""


class Unreadable(Exception):
    """etcd cannot be read."""


def newest(etcdctl: str, options: Sequence[str], namespace: str) -> tuple[int, int]:
    """The newest revision of distop's keys, and the store's. Raises Unreadable."""
    prefix = f"{namespace}/distOp" if namespace else "distOp"
    order = ["--order=DESCEND", "--sort-by=MODIFY", "--limit=1", "--keys-only"]
    command = [etcdctl, *options, "--write-out=json", "get", "--prefix", prefix, *order]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreadable(str(error)) from None
    if asked.returncode:
        raise Unreadable(asked.stderr.strip()[-500:])
    answer = json.loads(asked.stdout)
    found = [kv["mod_revision"] for kv in answer.get("kvs", [])]
    return max(found, default=0), int(answer["header"]["revision"])


def caught_up(follower: SecondFollower, known: int, store: int, quiet: float, timeout: float) -> bool:
    """Wait until the history up to now is audited. Returns False after the time-out.

    The last revisions may belong to other keys or to deletions, so the end counts as reached after ``quiet`` seconds
    without a change.
    """
    deadline = time.monotonic() + timeout
    seen, since = -1, time.monotonic()
    while follower.failure is None and time.monotonic() < deadline:
        if follower.auditor.revision != seen:
            seen, since = follower.auditor.revision, time.monotonic()
        if seen >= store or (seen >= known and time.monotonic() > since + quiet):
            return True
        time.sleep(LOOK)
    return False


def main() -> int:
    """Audit; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/second-audit", description=(__doc__ or "").splitlines()[0])
    default = os.environ.get("DISTOP_ETCD", "127.0.0.1:2379")
    parser.add_argument("--endpoints", default=default, help=f"endpoints of etcd ({default})")
    parser.add_argument("--user", help="NAME:PASSWORD, if etcd requires authentication")
    parser.add_argument("--namespace", default="", help="namespace of distop's keys (none)")
    parser.add_argument("--etcdctl", default="etcdctl", help="path of etcdctl (etcdctl)")
    parser.add_argument("--quiet", type=float, default=2.0, help="seconds without a change that end the audit (2)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="time limit in seconds for the whole history (600)"
    )
    given = parser.parse_args()
    options = ["--endpoints", given.endpoints, *(["--user", given.user] if given.user else [])]
    try:
        known, store = newest(given.etcdctl, options, given.namespace)
    except Unreadable as error:
        print(f"second audit: etcd cannot be read: {error}", file=sys.stderr)
        return 3
    auditor = SecondAuditor(given.namespace, clock=None)
    with SecondFollower(given.etcdctl, options, given.namespace, auditor) as follower:
        complete = caught_up(follower, known, store, given.quiet, given.timeout)
    if not complete:
        why = follower.failure or f"revision {known} was not reached within {given.timeout:g} s (--timeout)"
        print(f"second audit: the history cannot be audited: {why}", file=sys.stderr)
        return 3
    for violation in auditor.violations:
        print(violation)
    print(f"{follower.summary()}, violations: {len(auditor.violations) or 'none'}")
    return 1 if auditor.violations else 0


if __name__ == "__main__":
    sys.exit(main())
