"""Tunes Python's garbage collector in distop's own processes: command line, daemon and child.

A client library in another program does not change that program's collector.
"""

from __future__ import annotations

import gc

YOUNG = 10_000
"""Number of new objects that triggers a collection of the youngest generation.

A quarter of an operation of 84 jobs creates Python's default of 700, and reference counting frees almost all of them.
A much larger number would make each collection slow.
"""
LOADING = 100_000
"""The same number while a process imports its modules, which creates fewer objects."""
_enabled = False
"""Whether this process is one of distop's own."""


def tune_for_start() -> None:
    """Suppress collections during the start of a process, until :func:`freeze_loaded`.

    With Python's defaults, collections take a tenth of a daemon's start and free half a megabyte.
    """
    global _enabled
    _enabled = True
    gc.set_threshold(LOADING, *gc.get_threshold()[1:])


def freeze_loaded(*, collect: bool = True) -> None:
    """Exclude all current objects from later collections; can be called again after more modules were imported.

    ``collect``: collect garbage first; otherwise current garbage is never freed. Without this call, the daemon collects
    three times in an operation of 84 jobs, and examines all objects in every fiftieth, for tens of milliseconds. Does
    nothing in a process without :func:`tune_for_start`.
    """
    if not _enabled:
        return
    if collect:
        gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
