"""Checks that this executor's Spark has the jars of a table format, made for this version of Spark."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

_SCALA = "2.13"
"""PySpark's Scala version."""


@frozen
class FormatJars:
    """The jars with which Spark reads a table format.

    ``resource``: a class file in the first jar; the class does not use Spark, so a jar for another Spark shows it, too.
    ``artifact``: the start of the first jar's name, before the versions of Spark and Scala. ``version``: the tested
    release. ``others``: further jars, as ``group:artifact:version``.
    """

    title: str
    group: str
    artifact: str
    version: str
    resource: str
    others: Sequence[str] = ()

    def problem_of(self, jvm: Any, *classes: Any) -> str:
        """The error text if this JVM lacks the jars, or has those for another Spark; "" if they fit.

        ``classes``: some that py4j finds in this JVM if they can be linked.
        """
        from py4j.java_gateway import JavaPackage
        from pyspark import __version__

        # A class compiled for another Spark cannot be linked, and looks like a missing one. So look for the file of a
        # class that does not use Spark.
        loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        where = loader.getResource(self.resource)
        jar = str(where.toString()).removeprefix("jar:").partition("!")[0] if where is not None else None
        linked = not any(isinstance(one, JavaPackage) for one in classes)
        if jar is None or not linked or self.misfits(jar, __version__):
            return self.missing(__version__, jar)
        return ""

    def misfits(self, jar: str, spark: str) -> bool:
        """Whether the jar's name has another version of Spark or Scala, so that reading would end in linkage errors."""
        made_for = re.search(rf"{re.escape(self.artifact)}(\d+\.\d+)_(\d+\.\d+)", jar)
        return made_for is not None and made_for.groups() != (_minor(spark), _SCALA)

    def missing(self, spark: str, jar: str | None) -> str:
        """The error text if Spark lacks the jars, or has some that do not fit."""
        what = f"Spark has no {self.title}" if jar is None else f"the {self.title} of {jar} does not fit Spark {spark}"
        jars = (f"{self.group}:{self.artifact}{_minor(spark)}_{_SCALA}:{self.version}", *self.others)
        start = f"{what}: start the executors with --spark-conf spark.jars="
        if len(jars) == 1:
            return f"{start}FILE, where FILE is the jar {jars[0]}"
        return f"{start}FILES, where FILES are the jars {' and '.join(jars)}, with a comma between them"


def _minor(spark: str) -> str:
    return ".".join(spark.split(".")[:2])
