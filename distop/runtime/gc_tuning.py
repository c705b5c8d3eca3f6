"""How often a process of ours stands still to look for garbage in circles. For the command line, daemon and child;
never for a library in somebody else's process.
"""

from __future__ import annotations

import gc

YOUNG = 10_000
"""Objects more than at the last look, after which the next one is due; Python's own 700 are made by a quarter of an
operation of 84 jobs, and almost all of them are gone without any look, once nobody refers to them. Not many more: a
look takes as long as there are objects.
"""
LOADING = 100_000
"""The same of a process that loads what it needs: more than that makes."""
_begun = False
"""This process is ours."""


def begin() -> None:
    """Of a process of ours that begins: hardly any look until :func:`settle`, if that comes. Those that Python would
    have while a daemon loads what it needs, and one at the end, take a tenth of its start, and find half a megabyte.
    """
    global _begun
    _begun = True
    gc.set_threshold(LOADING, *gc.get_threshold()[1:])


def settle(*, look: bool = True) -> None:
    """What has been loaded by now stays as long as the process: no look goes through it any more. May be called again,
    when more has been loaded. ``look``: what is garbage by now goes first, and stays otherwise.

    Without it the daemon looks three times in an operation of 84 jobs, and at all that it has in every fiftieth, for
    tens of milliseconds. A process of somebody else, for which :func:`begin` was not called, is left as it is.
    """
    if not _begun:
        return
    if look:
        gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
