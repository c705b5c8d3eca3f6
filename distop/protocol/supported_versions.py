"""Which versions of etcd (docs/internals/etcd-rules.md, "Server versions") and Java are supported."""

from __future__ import annotations

import re

from distop.protocol.frozen import frozen

RECOMMENDED: dict[tuple[int, ...], tuple[int, int, int]] = {(3, 5): (3, 5, 33), (3, 6): (3, 6, 14), (3, 7): (3, 7, 1)}
"""Minor version → its first release without a known defect that affects distop."""

_NOTABLE: tuple[tuple[str, tuple[tuple[int, int, int], ...]], ...] = (
    ("inconsistent data after a crash (#13766)", ((3, 5, 3),)),
    ("a read that is given up may end the server (#14110)", ((3, 5, 5),)),
    ("leases revoked by an old leader (#15247)", ((3, 4, 31), (3, 5, 13))),
    ("lost watch events (#17529)", ((3, 4, 31), (3, 5, 13))),
    ("dropped delete events (#18089)", ((3, 5, 16),)),
    ("old events sent again (#20221)", ((3, 5, 22), (3, 6, 2))),
    ("renewals of revoked leases acknowledged", ((3, 4, 38), (3, 5, 23), (3, 6, 5))),
    ("stale linearizable reads (#20418)", ((3, 5, 28), (3, 6, 9))),
    ("watches that see more than their role allows", ((3, 5, 33), (3, 6, 14))),
)
"""Defects, and the releases that fixed them, per minor version."""

OLDEST = (3, 4)
OLDEST_JAVA = 17


@frozen
class Judgement:
    """``level``: ok, warning (works with limits) or error (do not use); ``text``: why, and what to do."""

    level: str
    text: str

    @property
    def brief(self) -> str:
        """The text without the list of defects and their numbers."""
        return re.sub(r" \(known defects: (?:[^()]|\([^()]*\))*\)| \(#[0-9]+\)", "", self.text)


def parse_version(text: str) -> tuple[int, ...]:
    """``3.5.1`` or ``3.6.0-rc.1`` as three numbers; () for an invalid version."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def judge_etcd(text: str, members: int) -> Judgement:
    """Judges an etcd server's version. ``members``: the size of its cluster (0: unknown)."""
    version = parse_version(text)
    if not version:
        return Judgement("warning", f"cannot read the version of etcd ({text or 'not permitted'})")
    minor = version[:2]
    if minor < OLDEST:
        return Judgement("error", f"etcd {text} is too old: use 3.5.33, 3.6.14, 3.7.1 or newer")
    if (3, 5, 0) <= version <= (3, 5, 2) and members > 1:
        return Judgement(
            "error",
            f"etcd {text} can lose data after a crash (#13766): update all {members} members to 3.5.33 or newer",
        )
    if minor > max(RECOMMENDED) or (minor in RECOMMENDED and version >= RECOMMENDED[minor]):
        return Judgement("ok", f"etcd {text}")
    wanted = ".".join(map(str, RECOMMENDED.get(minor, RECOMMENDED[3, 5])))
    defects = [what for what, fixes in _NOTABLE if _affects(version, fixes)]
    known = f" (known defects: {', '.join(defects)})" if defects else ""
    use = "for one development node only" if members <= 1 else "not for production"
    return Judgement("warning", f"etcd {text} is {use}{known}: update to {wanted} or newer")


def _affects(version: tuple[int, ...], fixes: tuple[tuple[int, int, int], ...]) -> bool:
    return any(version[:2] == fix[:2] and version < fix for fix in fixes)


def orders_requested_progress(version: tuple[int, ...]) -> bool:
    """Whether this server orders requested progress notifications with events (W3)."""
    return version >= (3, 5, 8) or (3, 4, 25) <= version < (3, 5)


def java_major(output: str) -> int | None:
    """The major version in the output of ``java -version``: 17 for ``17.0.9``, 8 for ``1.8.0_392``."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', output)
    if found is None:
        return None
    return int(found[2]) if found[1] == "1" and found[2] else int(found[1])


def judge_java(output: str) -> Judgement:
    """Judges the output of ``java -version``. The text of an error continues a sentence about that java."""
    major = java_major(output)
    if major is None:
        return Judgement("error", "does not print its version")
    if major < OLDEST_JAVA:
        return Judgement("error", f"is version {major}")
    return Judgement("ok", f"Java {major}")
