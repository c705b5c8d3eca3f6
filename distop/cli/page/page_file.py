"""Writes the page of an operation to a file or to stdout.

Renders a page as one HTML text that needs no files, no scripts and no network.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.cli.output import write_bytes
from distop.cli.page.content import page
from distop.errors import InvalidArgument, UsageError

if TYPE_CHECKING:
    from distop.cli.page.content import Page
    from distop.services.page import Gathered


STDOUT = "-"


def check(file: str, *, json: bool) -> None:
    """Check ``--html FILE`` before etcd is asked. Raises UsageError, InvalidArgument."""
    if file == STDOUT:
        if json:
            raise UsageError("--html - and --json would both write to stdout: give --html a file")
        return
    path = Path(file)
    try:
        exists, folder, place = path.exists(), path.is_dir(), path.parent.is_dir()
    except OSError as error:  # such as a name that is too long
        raise _unwritable(file, error.strerror) from None
    if not file or folder:
        raise InvalidArgument(f"--html needs the name of a file (-: stdout), not {file!r}")
    if not place:
        raise _unwritable(file, f"there is no folder {path.parent}")
    if not os.access(path if exists else path.parent, os.W_OK):
        raise _unwritable(file, os.strerror(errno.EACCES))


def _unwritable(file: str, why: str | None) -> InvalidArgument:
    return InvalidArgument(f"{file} cannot be written: {why}")


def write(found: Gathered, file: str) -> None:
    """Write the page of an operation as UTF-8. Raises InvalidArgument if the file cannot be written."""
    made = page(found.ref, found.status, found.account, found.nodes, found.declaration, found.time)
    data = render(made).encode()
    if file == STDOUT:
        write_bytes(data)
        return
    try:
        Path(file).write_bytes(data)
    except OSError as error:
        raise _unwritable(file, error.strerror) from None


_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Characters that a page must not contain: control characters, bidirectional overrides, surrogates."""


def render(page: Page) -> str:
    """The HTML of a page. The template engine escapes all data; none of it is escaped by hand."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("distop.cli.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda node: type(node).__name__
    return environment.get_template("operation.html").render(page=page)


def visible(value: Any) -> Any:
    """Replace unprintable characters by escapes. The output of a template is escaped already."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return _UNSEEN.sub(lambda found: found.group().encode("unicode-escape").decode(), value)
    return value
