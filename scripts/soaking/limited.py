"""The type ``limited``: a ``noop`` whose jobs are run by the actor and by executors."""

from __future__ import annotations

from distop.protocol.behavior_declaration import Retry
from distop_behaviors.noop import Noop


class Limited(Noop):
    """No-op jobs with many attempts, so that a job may be lost several times."""

    type_name = "limited"
    retry = Retry(attempts=8, initial=0.1, maximum=1.0)
