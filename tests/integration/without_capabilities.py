"""``python -m tests.integration.without_capabilities COMMAND…``: run a command without root's capabilities.

Processes of root can read all others. Without its capabilities, root has the access that any user has to its processes.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_CAPBSET_DROP = 24

if __name__ == "__main__":
    libc = ctypes.CDLL(None)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails without capabilities, when there are none to drop
    os.execvp(sys.argv[1], sys.argv[1:])
