"""``limited``: ``noop`` as a type of its own, whose jobs a test's actor runs beside the executors."""

from __future__ import annotations

from distop.protocol.behavior_declaration import Retry
from distop_behaviors.noop import Noop


class Limited(Noop):
    """A job may be lost several times."""

    type_name = "limited"
    retry = Retry(attempts=8, initial=0.1, maximum=1.0)
