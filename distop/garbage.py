"""How often a process of ours stands still to look for garbage in circles. For daemon and child; never for a library in
somebody else's process.
"""

from __future__ import annotations

import gc

YOUNG = 10_000
"""Objects more than at the last look, after which the next one is due; Python's own 700 are made by a quarter of an
operation of 84 jobs, and almost all of them are gone without any look, once nobody refers to them. Not many more: a
look takes as long as there are objects.
"""


def settle() -> None:
    """What has been loaded by now stays as long as the process: no look goes through it any more. May be called again,
    when more has been loaded.

    Without it the daemon looks three times in an operation of 84 jobs, and at all that it has in every fiftieth, for
    tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
