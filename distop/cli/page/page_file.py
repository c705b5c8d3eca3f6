"""Reading what a page is made of, and writing the page where it is wanted.

The page as HTML: one text that needs nothing else, neither files nor scripts nor the network.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.cli.page.content import Page, page
from distop.clock import time
from distop.errors import InvalidArgument, UsageError
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.txn import Get
from distop.services.inspection.partitions import look
from distop.services.inspection.status import live_nodes
from distop.services.readable_records import readable

if TYPE_CHECKING:
    from distop.client.async_client import Client
    from distop.protocol.records import OperationRef
    from distop.services.operation_results import OperationStatus


STDOUT = "-"


def check(file: str, *, json: bool) -> None:
    """What can be told of ``--html FILE`` before etcd is asked. Raises UsageError, InvalidArgument."""
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
        raise InvalidArgument(f"--html is to be followed by a file's name (-: to stdout), and {file!r} is none")
    if not place:
        raise _unwritable(file, f"there is no folder {path.parent}")
    if not os.access(path if exists else path.parent, os.W_OK):
        raise _unwritable(file, os.strerror(errno.EACCES))


def _unwritable(file: str, why: str | None) -> InvalidArgument:
    return InvalidArgument(f"{file} cannot be written: {why}")


async def gather(client: Client, ref: OperationRef) -> tuple[OperationStatus, Page]:
    """The operation's status, and its page. Raises NotFound, UnreadableRecord."""
    etcd, keys = client.etcd, client.keys
    while True:
        status = await client.operation(ref).status()
        account = await look(etcd, keys, ref)
        if account.ended == status.ended:
            break  # else it ended in between, which happens once
    nodes = await live_nodes(etcd, keys)
    (published,) = await etcd.read(Get(keys.behavior(ref.type)))
    declared = readable(etcd, Declaration.decode, published.kvs)
    return status, page(ref, status, account, nodes, declared[0][1] if declared else None, time.time())


def write(made: Page, file: str) -> None:
    """Write the page as UTF-8. Raises InvalidArgument where the file cannot be written."""
    data = render(made).encode()
    if file == STDOUT:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        Path(file).write_bytes(data)
    except OSError as error:
        raise _unwritable(file, error.strerror) from None


_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""What no page may hold, or what turns the text around it: control characters, bidirectional overrides, surrogates."""


def render(page: Page) -> str:
    """The page. What comes from data is escaped by the templates' own rule, none of it by hand."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("distop.cli.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda node: type(node).__name__
    return environment.get_template("operation.html").render(page=page)


def _visible(value: Any) -> Any:
    """Characters that cannot be shown, as escapes. What a template has made is left as it is: it was made of such."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return _UNSEEN.sub(lambda found: found.group().encode("unicode-escape").decode(), value)
    return value
