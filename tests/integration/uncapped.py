"""``python -m tests.integration.uncapped COMMAND…``: run it without any of root's capabilities, as anybody would.

Root's processes look into all others; the same user without these may do what processes of one user may to each other.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_CAPBSET_DROP = 24

if __name__ == "__main__":
    libc = ctypes.CDLL(None)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # who has none is refused, and needs none dropped
    os.execvp(sys.argv[1], sys.argv[1:])
