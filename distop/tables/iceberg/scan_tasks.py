"""The scan tasks of an Iceberg snapshot in the JVM: their files, deletes, and the tasks of chosen files."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from distop.storage.files import identity
from distop.tables.iceberg.snapshot_checks import check_opened
from distop.tables.reading.file_facts import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import SparkSession


class ScanTasks:
    """The scan tasks of a snapshot. ``snapshot``: its description, for errors.

    A call into the JVM takes longer than Java's work on a hundred tasks. So all paths are read as one text, and tasks
    are chosen by an array of their indexes.
    """

    def __init__(self, session: SparkSession, planned: Any, snapshot: str) -> None:
        jvm: Any = session._jvm
        self._jvm = jvm
        self._gateway: Any = session.sparkContext._gateway
        self._snapshot = snapshot
        iceberg = self._jvm.org.apache.iceberg
        self._guava = iceberg.relocated.com.google.common
        self._all = self._guava.collect.Lists.newArrayList(planned)
        java = jvm.java
        location = self._method(iceberg.ContentFile, "location", _class(java.lang.String))
        file = self._method(iceberg.ContentScanTask, "file", _class(iceberg.ContentFile))
        paths = self._texts(self._all, java.lang.invoke.MethodHandles.filterReturnValue(file, location))
        self._indexes = {name: n for n, name in enumerate(paths)}
        self._deletes_of_task = self._method(iceberg.FileScanTask, "deletes", _class(java.util.List))
        distinct = self._guava.collect.Sets.newIdentityHashSet()
        self._guava.collect.Iterables.addAll(
            distinct, self._guava.collect.Iterables.concat(self._mapped(self._all, self._deletes_of_task))
        )
        deletes = self._guava.collect.Lists.newArrayList(distinct)
        places = (self._numbers(deletes, name) for name in ("contentOffset", "contentSizeInBytes"))
        self.deletes = list(zip(self._texts(deletes, location), *places, strict=True))
        """The delete files of the tasks: path, and offset and size of a deletion vector."""
        self._checked: list[tuple[str, ...]] | None = None
        """The identities of the delete files at their last check."""

    def check_deletes(self, source: str) -> None:
        """Raises InvalidArgument if a delete file may not belong to the table.

        To be called for each use, since a delete file may have been replaced; it only checks again after a change.
        """
        now = [identity(path) for path, _, _ in self.deletes]
        if now != self._checked:
            check_opened(source, (), self.deletes)
            self._checked = now

    @property
    def paths(self) -> Iterable[str]:
        """The data files of the tasks."""
        return self._indexes

    def of_files(self, paths: Iterable[str]) -> Any:
        """A Java list of the tasks that read these files. Raises Unreadable for a file that the snapshot lacks."""
        indexes = []
        for path in paths:
            if path not in self._indexes:
                raise Unreadable(f"the file {path} is not in {self._snapshot}")
            indexes.append(self._indexes[path])
        packed = bytearray(struct.pack(f">{len(indexes)}i", *indexes))
        java = self._jvm.java
        chosen = self._gateway.new_array(self._jvm.int, len(indexes))
        java.nio.ByteBuffer.wrap(packed).asIntBuffer().get(chosen)
        get = self._method(java.util.List, "get", _class(java.lang.Object), java.lang.Integer.TYPE).bindTo(self._all)
        return java.util.ArrayList(self._mapped(self._guava.primitives.Ints.asList(chosen), get))

    def without_deletes(self, paths: Iterable[str]) -> Any:
        """The tasks that read these files; None if one of them has deletes. Raises the errors of :meth:`of_files`."""
        tasks, iterables = self.of_files(paths), self._guava.collect.Iterables
        return tasks if iterables.isEmpty(iterables.concat(self._mapped(tasks, self._deletes_of_task))) else None

    def _texts(self, values: Any, method: Any) -> list[str]:
        """The texts that a method returns for each value. Raises Unreadable if one of them has a NUL."""
        size = int(values.size())
        texts = str(self._jvm.java.lang.String.join("\0", self._mapped(values, method))).split("\0") if size else []
        if len(texts) != size:
            raise Unreadable(f"a path in {self._snapshot} has a NUL")
        return texts

    def _numbers(self, files: Any, name: str) -> list[int | None]:
        """The numbers that a method returns for each delete file; None for null."""
        java = self._jvm.java
        anything = _class(java.lang.Object)
        method = self._method(self._jvm.org.apache.iceberg.DeleteFile, name, _class(java.lang.Long))
        as_text = java.lang.invoke.MethodHandles.publicLookup().findStatic(
            _class(java.lang.String),
            "valueOf",
            java.lang.invoke.MethodType.methodType(_class(java.lang.String), anything),
        )
        of_any = method.asType(method.type().changeReturnType(anything))
        texts = self._texts(files, java.lang.invoke.MethodHandles.filterReturnValue(of_any, as_text))
        return [None if text == "null" else int(text) for text in texts]

    def _method(self, owner: Any, name: str, *types: Any) -> Any:
        """The handle of a method; ``types``: of its result and its parameters."""
        invoke = self._jvm.java.lang.invoke
        return invoke.MethodHandles.publicLookup().findVirtual(
            _class(owner), name, invoke.MethodType.methodType(*types)
        )

    def _mapped(self, values: Any, method: Any) -> Any:
        """A Java list of a method's results for each value, without further calls from Python."""
        proxies = self._jvm.java.lang.invoke.MethodHandleProxies
        return self._guava.collect.Lists.transform(
            values, proxies.asInterfaceInstance(_class(self._guava.base.Function), method)
        )


def _class(cls: Any) -> Any:
    return cls._java_lang_class
