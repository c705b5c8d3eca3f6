"""Sentences about names that etcd does not know, with the nearest known name."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from distop.errors import EtcdRejected, InvalidArgument
from distop.protocol import keys as K
from distop.protocol.texts import did_you_mean, shown
from distop.protocol.txn import Get

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.store.client import EtcdClient

_TABLES_SEARCHED = 1_000
"""Registered tables among which a similar name is searched for an error message."""


async def unknown_table(etcd: EtcdClient, keys: Keys, name: str) -> str:
    """``there is no table 'x' (did you mean 'y'?)``. A user that may not list all tables gets no proposal."""
    if not etcd.suggests_tables:
        return f"there is no table {shown(name)}"
    try:
        listed = (await etcd.read(Get(*keys.family(K.TABLE), limit=_TABLES_SEARCHED, keys_only=True)))[0].kvs
    except EtcdRejected:
        listed = ()
    known = []
    for kv in listed:
        with contextlib.suppress(InvalidArgument):  # no key of ours
            known.append(keys.parse(kv.key).table)
    return f"there is no table {shown(name)}{did_you_mean(name, known)}"
