"""What is known of etcd's versions (docs/etcd-rules.md, "Server versions"). Pure."""

from __future__ import annotations

from distop.core.frozen import frozen

RECOMMENDED = ((3, 5, 33), (3, 6, 14), (3, 7, 1))
"""The least good release of each line."""


@frozen
class Verdict:
    """``refused``: why this server must not be used; ``warning``: what to know of it. Empty: nothing to say."""

    refused: str = ""
    warning: str = ""


def parse(text: str) -> tuple[int, ...]:
    """``"3.5.1"`` → ``(3, 5, 1)``; what follows a hyphen is left out."""
    return tuple(int(part) for part in text.partition("-")[0].split(".") if part.isdigit())


def judge(version: tuple[int, ...], members: int) -> Verdict:
    """May a cluster of so many members of this version be relied on? An unknown version may."""
    if not version:
        return Verdict()
    name = ".".join(map(str, version))
    if version < (3, 4):
        return Verdict(refused=f"etcd {name} is too old: use 3.5.33, 3.6.14, 3.7.1 or newer")
    if (3, 5, 0) <= version <= (3, 5, 2):
        if members > 1:
            return Verdict(
                refused=f"etcd {name} can lose consistency between members after a crash (etcd issue 13766): "
                "upgrade the cluster to 3.5.33, 3.6.14, 3.7.1 or newer"
            )
        return Verdict(warning=f"etcd {name} can corrupt its data in a crash; it will do for a development node only")
    least = next((good for good in RECOMMENDED if good[:2] == version[:2]), None)
    if version < RECOMMENDED[0] or (least is not None and version < least):
        return Verdict(warning=f"etcd {name} has known faults that are fixed in 3.5.33, 3.6.14 and 3.7.1: upgrade it")
    return Verdict()


def orders_requested_progress(version: tuple[int, ...]) -> bool:
    """Whether a progress that was requested is ordered with the events on this server (W3)."""
    return version >= (3, 5, 8) or (3, 4, 25) <= version < (3, 5)
