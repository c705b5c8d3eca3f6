"""``validate`` on lineitem as an Iceberg or a Delta table, relative to one SQL statement (see ``benchmarks.validate``).

One partition per month, and one file per partition.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from benchmarks import validate
from benchmarks.common import CACHE, Result, report_progress
from benchmarks.validate import Subject

MONTH = "ship_month"


@dataclass(frozen=True, slots=True)
class TableFormat:
    """A table format.

    ``statistics``: where its statistics are; ``jars``: those of Spark, or the text of the error without them;
    ``write``: writes a table with a partition for each of the given tables; ``renew``: makes a new version of a table,
    so that nothing of it is cached; ``settings``: further ones of Spark.
    """

    name: str
    statistics: str
    jars: Callable[[], Sequence[Path] | str]
    write: Callable[[Path, Iterator[pa.Table]], None]
    renew: Callable[[Path], None]
    settings: Mapping[str, str] = field(default_factory=dict)

    def run(
        self, scale: float = 1, runs: int = 7, lives: int = 3, cases: Sequence[str] = validate.CASE_NAMES
    ) -> Result:
        """Like ``benchmarks.validate.run``. Raises RuntimeError if the jars are not available."""
        result = Result(self.name, {"scale": scale, "runs": runs, "lives": lives})
        return validate.measure(result, self.subject(scale), validate.chosen(cases, self.statistics))

    def subject(self, scale: float) -> Subject:
        """The table, and an executor that can read it. Raises RuntimeError if the jars are not available."""
        return Subject(self.name, self.table(scale), self.renew, self.options())

    def options(self) -> list[str]:
        """The options of an executor that can read the format. Raises RuntimeError if the jars are not available."""
        return [part for name, value in self.spark().items() for part in ("--spark-conf", f"{name}={value}")]

    def spark(self) -> dict[str, str]:
        """The settings of a session that can read the format. Raises RuntimeError if the jars are not available."""
        jars = self.jars()
        if isinstance(jars, str):
            raise RuntimeError(jars)
        return {"spark.jars": ",".join(map(str, jars)), **self.settings}

    def table(self, scale: float) -> Path:
        """The table, generated once per scale.

        It is written in its final location, because metadata may contain absolute paths. A marker file, written last,
        shows that the table is complete.
        """
        source, target = validate.table(scale), CACHE / f"{self.name}-lineitem-{scale:g}"
        complete = target / "whole"
        if not complete.exists():
            report_progress(f"{self.name}: generating lineitem at scale {scale:g} in 84 monthly partitions")
            shutil.rmtree(target, ignore_errors=True)
            self.write(target, _months(source))
            complete.touch()
        return target


def _months(source: Path) -> Iterator[pa.Table]:
    import pyarrow.parquet as pq

    for folder in sorted(source.glob("*=*")):  # excludes the folder with operations' own files
        (path,) = folder.glob("*.parquet")
        month = pq.read_table(path, partitioning=None)
        yield month.append_column(MONTH, pa.array([folder.name.partition("=")[2]] * len(month)))
