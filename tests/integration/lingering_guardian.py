"""A guardian to which a process of its session seems to live until a file is there, whatever is done to it.

The kernel keeps such ones, and none can be made without root's help. No process has the number of this one.
"""

from __future__ import annotations

import os
import sys

NOBODY = 999_999_999


def main(path: str, dead: str, rest: list[str]) -> None:
    """``lingering.py GUARDIAN DEAD CONTROL …``"""
    sys.path.append(os.path.dirname(path))  # noqa: PTH120
    import guardian  # type: ignore[import-not-found]

    members = guardian.session_members

    def lingering(sid: int) -> list[int]:
        found: list[int] = members(sid)
        return found or ([] if os.path.exists(dead) else [NOBODY])  # noqa: PTH110

    guardian.session_members = lingering
    guardian.UNKILLABLE = 0.1
    guardian.main(rest)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
