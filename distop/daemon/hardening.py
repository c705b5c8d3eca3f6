"""Keeps what a daemon knows of etcd (its password, the keys of its certificates) from what it runs.

Jobs run as the daemon's user, and the kernel lets processes of one user look into each other: /proc/PID/environ holds
the environment that a process began with, even of variables that it removed, and /proc/PID/mem everything else.
"""

from __future__ import annotations

import ctypes
import logging
import os

from distop.errors import describe
from distop.runtime import secret_settings

log = logging.getLogger("distop.executor")

PR_SET_DUMPABLE = 4


def shut() -> None:
    """Bar processes of the same user, all but root's, from this one's environment, memory and descriptors, for as long
    as it lives; programs that it starts are as open as ever. It leaves no core dump, and only root can debug it.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except (OSError, AttributeError) as error:
        said = "Cannot protect this process's memory: jobs may read its etcd password. Run it as a user of its own: %s"
        log.warning(said, describe(error))


def forget_credentials() -> None:
    """Take credentials, once they have been read, out of this process's variables: nothing started here has them."""
    for name in secret_settings.CREDENTIALS:
        os.environ.pop(name, None)
