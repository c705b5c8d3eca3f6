"""A guardian that sees an unkillable process in its session until a file exists.

The kernel can keep such processes, but only root can create one. This one is simulated: no process has its pid.
"""

from __future__ import annotations

import os
import sys

UNUSED_PID = 999_999_999


def main(path: str, dead: str, rest: list[str]) -> None:
    """``lingering_guardian.py GUARDIAN DEAD CONTROL …``: ``DEAD`` is the file that ends the simulated process."""
    sys.path.append(os.path.dirname(path))  # noqa: PTH120
    import guardian  # type: ignore[import-not-found]

    members = guardian.session_members

    def lingering(sid: int) -> list[int]:
        found: list[int] = members(sid)
        return found or ([] if os.path.exists(dead) else [UNUSED_PID])  # noqa: PTH110

    guardian.session_members = lingering
    guardian.UNKILLABLE = 0.1
    guardian.main(rest)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
