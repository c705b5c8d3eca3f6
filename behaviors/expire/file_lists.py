"""Lists of files in the stages of jobs: those that removed versions had, and those that others need.

The second list has only hashes. Two files with the same hash both stay, so a collision keeps a file too many.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from array import array
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.texts import shown
from distop.storage.normal_uris import normal, spelling
from distop.storage.opened_stores import store_of
from distop.tables.reachability import TableFile
from distop_behaviors.expire.expire_argument import ListedFiles
from distop_behaviors.orphans.text_digest import text_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distop.storage.deletion import Place
    from distop.storage.normal_uris import NormalUri

EXPIRED, KEPT = "expired", "kept"
LIST_BYTES = 256 << 20
"""Maximum bytes of a list; a job reads some hundred thousand entries."""
_HASH = 8


def file_hash(place: NormalUri, path: str) -> int:
    """A hash of a file's key below the table's folder; of a file elsewhere, of its name.

    Paths that some reader may take for the same file have the same hash (``normal_uris.spelling``). Raises
    InvalidArgument for a path that readers resolve differently.
    """
    try:
        found = normal(path)
    except UnsafePath as error:
        raise InvalidArgument(f"the table's metadata name the file {shown(path)}: {error}") from None
    if place.has(found):
        return key_hash(found.below(place))
    return name_hash(found.path)


def key_hash(key: str) -> int:
    """The hash of a file below the table's folder."""
    return _hash(spelling(key))


def name_hash(path: str) -> int:
    """The hash of a file elsewhere, which may be a file of the table under another path of its folder."""
    return _hash(f"//{spelling(path.rpartition('/')[2])}")


def _hash(text: str) -> int:
    return int.from_bytes(text_digest(text, _HASH), "little")


def write_expired(stage: Place, files: Iterable[TableFile]) -> ListedFiles:
    """Write the files that removed versions had. Raises OSError."""
    text = "".join(json.dumps([one.path, one.kind, one.size or 0]) + "\n" for one in files)
    return _write(stage, EXPIRED, gzip.compress(text.encode(), 5, mtime=0))


def write_kept(stage: Place, hashes: Iterable[int]) -> ListedFiles:
    """Write the hashes of needed files. Raises OSError."""
    return _write(stage, KEPT, array("Q", sorted(hashes)).tobytes())


def _write(stage: Place, name: str, data: bytes) -> ListedFiles:
    if len(data) > LIST_BYTES:
        raise InvalidArgument(f"the list of files has {len(data)} bytes, but at most {LIST_BYTES} are supported")
    store_of(stage).put(name, data)  # an earlier process may have run the same attempt
    return ListedFiles(bytes=len(data), digest=_digest(data))


def read_expired(stage: Place, listed: ListedFiles) -> Iterator[TableFile]:
    """Read a list of :func:`write_expired`. Raises OSError, also if it is damaged."""
    for line in gzip.decompress(_read(stage, EXPIRED, listed)).decode().splitlines():
        path, kind, size = json.loads(line)
        yield TableFile(path, kind, size)


def read_kept(stage: Place, listed: ListedFiles) -> Iterable[int]:
    """Read a list of :func:`write_kept`. Raises OSError, also if it is damaged."""
    found = array("Q")
    found.frombytes(_read(stage, KEPT, listed))
    return found


def _read(stage: Place, name: str, listed: ListedFiles) -> bytes:
    data = store_of(stage).get(name, limit=LIST_BYTES).data
    if len(data) != listed.bytes or _digest(data) != listed.digest:
        raise OSError(f"the list {name} in {stage.location} is damaged: it differs from the job's result")
    return data


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
