"""Binds a work directory to one etcd cluster, and checks the binding before its files are used.

Files in a work directory refer to operations by name, and names are not unique: another namespace, another cluster, or
a cluster restored from an older snapshot may use them again. So a directory is bound to the first cluster it is used
with, and to that cluster's highest known revision. Only the removal of the directory ends the binding, so that no
restart by a service manager can.
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
"""Minimum seconds between two writes. If etcd loses revisions of the last seconds, that may not be detected."""


class BindingFile:
    """The file of a binding. Its methods block, and raise OSError."""

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir
        self._path = work_dir / "cluster.json"

    def read(self) -> bytes | None:
        """The content of the file; None if it does not exist."""
        with contextlib.suppress(FileNotFoundError), os.fdopen(open_fixed(self._path, os.O_RDONLY), "rb") as file:
            return file.read()
        return None

    def write(self, data: bytes) -> None:
        """Replace the file atomically; it is on the disk when this returns."""
        write_whole(self._path, data, 0o600)


class Binding:
    """The binding of one work directory. All consecutive clients of the daemon share its ``identity``."""

    def __init__(self, file: BindingFile, namespace: str, identity: Identity, written: tuple[int, int]) -> None:
        self.identity = identity
        self._file = file
        self._namespace = namespace
        self._written = written
        self._writing = asyncio.Lock()

    @classmethod
    def load(cls, file: BindingFile, namespace: str) -> Binding:
        """Read the binding. Raises NotAllowed for a directory of another namespace, InvalidArgument if unreadable."""
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
                f"cannot read {where}/cluster.json, which names the etcd cluster of this work directory "
                f"({describe(error)}): move the directory away, or give another --work-dir"
            ) from None
        if data is not None and bound != namespace:
            raise NotAllowed(
                f"the work directory {where} belongs to {_named(bound)}, but this executor serves "
                f"{_named(namespace)}: give another --work-dir, or move this directory away"
            )
        identity = Identity(
            cluster_id,
            revision,
            other=f"the work directory {where} belongs to the previous cluster; give that cluster's endpoints "
            "(--etcd), give another --work-dir, or move this directory away if the previous cluster no longer exists",
            back=f"etcd was restored from an older snapshot, or its version is older than 3.5.28 or 3.6.9 and it "
            "answered with old data. If it was restored: stop all executors, check what was lost "
            f"(docs/how-to/back-up-and-restore.md), move the work directory {where} away, and start again. If not: "
            "update etcd, and start again with this directory",
        )
        return cls(file, namespace, identity, (cluster_id, revision))

    async def save(self) -> None:
        """Write the current identity if it has changed. Raises OSError."""
        async with self._writing:
            known = (self.identity.cluster_id, self.identity.revision)
            if not known[0] or known == self._written:
                return
            record = {"v": 1, "namespace": self._namespace, "cluster_id": f"{known[0]:x}", "revision": known[1]}
            await asyncio.to_thread(self._file.write, dumps(record))
            self._written = known

    async def keep(self, ended: asyncio.Event) -> None:
        """Save the identity regularly, and once more when ``ended`` is set."""
        logged = ""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await ended.wait()
            last_time = ended.is_set()
            try:
                await self.save()
                logged = ""
            except OSError as error:
                # The saved revision stays valid, but detects less.
                if describe(error) != logged:
                    logged = describe(error)
                    message = "Cannot save etcd's revision in the work directory %s; retrying: %s"
                    log.warning(message, self._file.work_dir, logged)
            if last_time:
                return


def _named(namespace: str) -> str:
    return f"the namespace {namespace!r}" if namespace else "no namespace"
