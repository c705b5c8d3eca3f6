"""Which cluster a work directory belongs to: written down there, and compared before anything in it is believed.

What lies in a work directory speaks of operations by their names, and names come again: in another namespace, another
cluster, or one that was restored from an older snapshot. So a directory is bound to the first cluster that it is used
with, and to how far that one had come; nothing but the removal of the directory unbinds it, so that no restart by a
service manager can.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, NotAllowed, describe
from distop.protocol.json_codec import UNREADABLE, dumps, loads
from distop.storage.files import open_fixed, write_whole
from distop.store.cluster_identity import Identity

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("distop.executor")

EVERY = 2.0
"""Seconds between two writes, at least. What etcd loses of its last moments may go unnoticed for that long."""


class BindingFile:
    """Where a binding is written down. All of it blocks, and raises OSError."""

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir
        self._path = work_dir / "cluster.json"

    def read(self) -> bytes | None:
        """What is there; None where nothing is."""
        with contextlib.suppress(FileNotFoundError), os.fdopen(open_fixed(self._path, os.O_RDONLY), "rb") as file:
            return file.read()
        return None

    def write(self, data: bytes) -> None:
        """A whole file, on the disk when this returns."""
        write_whole(self._path, data, 0o600)


class Binding:
    """The binding of one work directory. ``identity`` is for all clients of the daemon, one after another."""

    def __init__(self, file: BindingFile, namespace: str, identity: Identity, written: tuple[int, int]) -> None:
        self.identity = identity
        self._file = file
        self._namespace = namespace
        self._written = written
        self._writing = asyncio.Lock()

    @classmethod
    def load(cls, file: BindingFile, namespace: str) -> Binding:
        """Read it. Raises NotAllowed where the directory belongs to another namespace, InvalidArgument where what is
        there cannot be read.
        """
        where = file.work_dir
        cluster_id = revision = 0
        try:
            data = file.read()
            if data is not None:
                record = loads(data)
                cluster_id, revision = int(record["cluster_id"], 16), int(record["revision"])
                bound = str(record["namespace"])
        except (OSError, *UNREADABLE) as error:
            raise InvalidArgument(
                f"what {where}/cluster.json tells of the cluster that this work directory belongs to cannot be read "
                f"({describe(error)}): move the directory away, or give another --work-dir"
            ) from None
        if data is not None and bound != namespace:
            raise NotAllowed(
                f"the work directory {where} belongs to {_named(bound)}, and this executor is told to serve "
                f"{_named(namespace)}: give it another one (--work-dir), or move this one away"
            )
        identity = Identity(
            cluster_id,
            revision,
            other=f"the work directory {where} belongs to the former one; name its endpoints (--etcd), give another "
            "--work-dir, or move this one away if the former cluster is gone for good",
            back=f"it was restored from an older snapshot, or it is older than 3.5.28 or 3.6.9 and answered with old "
            "data. If it was restored: stop all executors, see what was lost (docs/how-to/back-up-and-restore.md), "
            f"then move the work directory {where} away and start again. If it was not: update etcd, and start again "
            "with this directory",
        )
        return cls(file, namespace, identity, (cluster_id, revision))

    async def save(self) -> None:
        """Write down what is known by now, if it is news. Raises OSError."""
        async with self._writing:
            known = (self.identity.cluster_id, self.identity.revision)
            if not known[0] or known == self._written:
                return
            record = {"v": 1, "namespace": self._namespace, "cluster_id": f"{known[0]:x}", "revision": known[1]}
            await asyncio.to_thread(self._file.write, dumps(record))
            self._written = known

    async def keep(self, ended: asyncio.Event) -> None:
        """Write down what is known every now and then, and once more when ``ended`` is set."""
        told = ""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await ended.wait()
            over = ended.is_set()
            try:
                await self.save()
                told = ""
            except OSError as error:
                # What is remembered stays true, and notices less.
                if describe(error) != told:
                    told = describe(error)
                    log.warning("how far etcd has come cannot be written down in %s: %s", self._file.work_dir, told)
            if over:
                return


def _named(namespace: str) -> str:
    return f"the namespace {namespace!r}" if namespace else "no namespace"
