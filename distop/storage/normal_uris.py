"""Normal forms of paths and URLs, to compare the files that a store lists with those that metadata name. Pure.

Two texts name the same file for certain only if they are equal in scheme, authority and path. Equivalent schemes
(``s3a`` and ``s3``), ``file:`` and no scheme, doubled slashes and ``.`` do not count. Everything else does: case, and
the bytes of names, so that ``é`` as one and as two characters are two files.

A reader may decode percent escapes, and another may not; a file system may compose characters. So :func:`spelling` is
a coarser form: texts with different spellings name different files for every reader. A file whose spelling is that of
a needed file is never deleted.
"""

from __future__ import annotations

import re
import unicodedata
from urllib.parse import unquote

from distop.errors import UnsafePath
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown

SCHEMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfss": "abfs", "wasbs": "wasb"}
"""Schemes with their main equivalent."""
LOCAL = "file"
_LEFT_OUT = re.compile(r"/\.{0,2}(?:/|\Z)")
"""What a path has that is not normal: an empty name, ``.`` or ``..``."""
_DECODINGS = 8
"""Maximum number of times that a text is decoded: each shortens it, unless it is made to waste time."""


@frozen
class NormalUri:
    """The normal form of a path or URL. ``path``: without a slash at its end, and "" for the root."""

    scheme: str
    authority: str
    path: str

    @property
    def prefix(self) -> str:
        """The scheme with the authority, for messages."""
        return f"{self.scheme}://{self.authority}"

    def has(self, other: NormalUri) -> bool:
        """Whether another file or folder is below this folder, and is not the folder itself."""
        return self._same_store(other) and other.path.startswith(f"{self.path}/")

    def below(self, folder: NormalUri) -> str:
        """The path relative to a folder. Raises ValueError if it is not below the folder."""
        if not folder.has(self):
            raise ValueError(f"{self} is not below {folder}")
        return self.path[len(folder.path) + 1 :]

    def _same_store(self, other: NormalUri) -> bool:
        return (self.scheme, self.authority) == (other.scheme, other.authority)

    def __str__(self) -> str:
        return self.path or "/" if self.scheme == LOCAL else f"{self.prefix}{self.path}"


def normal(text: str) -> NormalUri:
    """The normal form of an absolute path or a URL.

    Raises UnsafePath for any other text, and for ``..``, which readers resolve differently.
    """
    scheme, authority, path = _parts(text)
    if path.startswith("/") and "\0" not in text and not _LEFT_OUT.search(path):
        return NormalUri(scheme, authority, path)  # as most paths are
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names or "\0" in text:
        raise UnsafePath(f"the path {shown(text)} has '..' or a NUL, so its readers may resolve it differently")
    return NormalUri(scheme, authority, "".join(f"/{name}" for name in names))


def is_normal(text: str) -> bool:
    """Whether the path in a text is that of its normal form: nothing in it is doubled or left out."""
    return _parts(text)[2] == normal(text).path


def _parts(text: str) -> tuple[str, str, str]:
    if text.startswith("/"):
        return LOCAL, "", text
    scheme, separator, rest = text.partition(":")
    scheme = scheme.lower()
    if not separator or not scheme.isascii() or not scheme.replace("+", "").replace("-", "").replace(".", "").isalnum():
        raise UnsafePath(f"{shown(text)} is neither an absolute path nor a URL")
    if not rest.startswith("//"):
        if scheme == LOCAL and rest.startswith("/"):
            return LOCAL, "", rest
        raise UnsafePath(f"the URL {shown(text)} has no '://' after its scheme")
    authority, slash, path = rest[2:].partition("/")
    if scheme == LOCAL:
        if authority not in ("", "localhost"):
            raise UnsafePath(f"the URL {shown(text)} names the machine {shown(authority)}: write file:///folder")
        return LOCAL, "", slash + path
    return SCHEMES.get(scheme, scheme), authority, slash + path


def spelling(path: str) -> str:
    """The coarser form of a path: decoded, composed (NFC), without empty names and ``.``."""
    if "%" not in path and path.isascii() and "//" not in path and "/." not in path:
        return path.strip("/")
    for _ in range(_DECODINGS):
        decoded = unquote(path, errors="surrogateescape")
        if decoded == path:
            break
        path = decoded
    composed = unicodedata.normalize("NFC", path)
    return "/".join(name for name in composed.split("/") if name not in ("", "."))
