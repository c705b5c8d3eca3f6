"""Protects a daemon's secrets (etcd's password, private keys of certificates) from its jobs.

Jobs run as the daemon's user, and the kernel lets processes of one user read each other: /proc/PID/environ has the
initial environment of a process, even variables that it removed, and /proc/PID/mem has its memory.
"""

from __future__ import annotations

import ctypes
import logging
import os

from distop.errors import describe
from distop.runtime import secret_settings

log = logging.getLogger("distop.executor")

PR_SET_DUMPABLE = 4


def protect_process() -> None:
    """Deny other processes of the same user access to this process's environment, memory and descriptors.

    Root keeps access. Programs that this process starts are not protected. There are no core dumps, and only root can
    attach a debugger.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except (OSError, AttributeError) as error:
        message = "Cannot protect this process's memory, so jobs may read its etcd password; use a separate user: %s"
        log.warning(message, describe(error))


def forget_credentials() -> None:
    """Remove credentials, after they were read, from the environment that started programs inherit."""
    for name in secret_settings.CREDENTIALS:
        os.environ.pop(name, None)
