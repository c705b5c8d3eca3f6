"""Copies Parquet files into a stage of a table with Arrow, on a disk or in an object store."""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from distop.storage.files import local_path
from distop.storage.opened_stores import store_of
from distop.tables.commits import RowsDiffer
from distop.tables.reading import arrow_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from distop.tables.commits import ReplacementContext
    from distop.tables.staged_files import StagedFiles

_CHUNK = 8 << 20


def copied(
    paths: Sequence[str],
    schema: pa.Schema,
    stage: StagedFiles,
    outputs: int,
    codec: str,
    ctx: ReplacementContext,
    *,
    size: int,
    written: Callable[[str, str], None] | None = None,
    empty: bool = False,
) -> list[str]:
    """Copy the rows of files into new files of a stage, compare them, and return the names of the new files.

    ``size``: the bytes of these files, for reports of the work. ``written``: called with the name and the SHA-256 of
    each new file. ``empty``: write a file also without rows.
    Raises RowsDiffer, and OSError.
    """
    import pyarrow as pa

    check, local = ctx.check_cancelled, local_path(stage.data.location)

    def copying(rows: int, of: int) -> None:
        ctx.work_done(bytes=size * rows // max(of, 1))

    try:
        with ExitStack() as stack:
            folder = local
            if folder is None:
                made = tempfile.TemporaryDirectory(prefix="compact-", dir=ctx.work_dir)
                folder = Path(stack.enter_context(made))
            done = arrow_copy.copy(paths, schema, folder, outputs, codec, check, _name, copying)
            arrow_copy.compare(paths, [f"{folder}/{file.name}" for file in done], schema, check)
            names = [file.name for file in done]
            if not names and empty:
                names.append(_name(0))
                arrow_copy.write_empty(folder / names[0], schema, codec)
            for name in names:
                check()
                if written is not None:
                    written(name, _sha256(folder / name))
                if local is None:
                    store_of(stage.data).put_large(name, _chunks(folder / name))
    except (pa.ArrowException, ValueError) as error:
        raise RowsDiffer(str(error)) from error
    return names


def _name(number: int) -> str:
    return f"part-{number:05}-{uuid.uuid4()}.parquet"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            yield data
