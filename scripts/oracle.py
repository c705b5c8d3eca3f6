"""Holds validate against generated tables; see ``scripts/oracle --help``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests.support

from distop.behavior import TableRecord
from scripts.judging.generated import ODD_NAMES, generate
from scripts.judging.oracle import mistakes, mistakes_beside, mistakes_of_where
from scripts.judging.parquet_files import MODES, Judged, judge_all, parquet_files
from tests.support.context import FakeContext
from tests.support.localspark import local_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAYS = {
    "only": partial(mistakes, mode="only"),
    "auto": partial(mistakes, mode="auto"),
    "never": partial(mistakes, mode="never"),
    "where": mistakes_of_where,
    "beside": mistakes_beside,
}
"""The values of ``statistics``, a condition on rows, and checks beside one on which Spark fails."""

SHOWN = 5
"""Mistakes printed for one file."""


def main(args: Sequence[str] | None = None) -> int:
    """0 where validate is right about all tables, else 1."""
    parser = argparse.ArgumentParser(
        prog="scripts/oracle",
        description="Generate tables with all that validate may stumble over, judge each row in plain Python, and have "
        "validate say the same: by statistics alone (never more than is so), by what they leave open, by a whole scan, "
        "of the rows that a condition picks, and beside an expression that breaks Spark.",
    )
    parser.add_argument("--tables", type=int, default=500, metavar="N", help="how many seeds (default 500)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the first seed (default 1)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="some of them (default: all)")
    parser.add_argument(
        "--parquet-files",
        type=Path,
        metavar="DIR",
        help="judge each Parquet file below this folder instead, damaged and encrypted ones among them (those of "
        "https://github.com/apache/parquet-testing, say), by what pyarrow reads of all of its rows",
    )
    wanted = parser.parse_args(args)
    if wanted.parquet_files is not None:
        return judge_files(wanted.parquet_files)
    begun, wrong, checks = time.perf_counter(), 0, 0
    seeds = range(wanted.seed, wanted.seed + wanted.tables)
    session = None if wanted.ways == ["only"] else _spark()
    for seed in seeds:
        found, count = judge(seed, wanted.ways, session)
        checks += count
        wrong += bool(found)
        for line in found:
            print(f"seed {seed}: {line}", flush=True)
        if seed % 25 == 0:
            print(f"seed {seed}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    print(
        f"{len(seeds)} tables (seeds {seeds[0]} to {seeds[-1]}), {checks} checks, judged {', '.join(wanted.ways)}: "
        f"{wrong} tables with a mistake"
    )
    return 1 if wrong else 0


def judge(seed: int, ways: Sequence[str], session: SparkSession | None) -> tuple[list[str], int]:
    """What is wrong of the table of a seed, and how many checks it has."""
    with tempfile.TemporaryDirectory(prefix="distop-oracle-") as folder:
        made = generate(seed, Path(folder) / ODD_NAMES[seed % len(ODD_NAMES)])
        work = Path(folder) / "work"
        work.mkdir()

        def context(table: TableRecord) -> FakeContext:
            return FakeContext(work, table, session)

        found: list[str] = []
        for way in ways:
            found += [f"{way}: {line}" for line in _told(WAYS[way], made, context)]
        return found, len(made.cases)


def judge_files(folder: Path) -> int:
    """Print a row for each Parquet file below a folder.

    Returns 0 where validate is right about all of them, else 1.
    """
    files = parquet_files(folder)
    if not files:
        print(f"no Parquet file found below {folder}", file=sys.stderr)
        return 1
    wide = max(len(str(path.relative_to(folder))) for path in files)
    print(f"{'file':{wide}}  {'rows':>9}  " + "  ".join(f"{mode:18}" for mode in MODES))
    wrong = 0
    for judged in judge_all(files):
        print(_row(judged, folder, wide), flush=True)
        wrong += bool(judged.mistakes)
        for mistake in judged.mistakes[:SHOWN]:
            print(f"    {mistake}", flush=True)
        if len(judged.mistakes) > SHOWN:
            print(f"    and {len(judged.mistakes) - SHOWN} more", flush=True)
    print(f"{len(files)} files, each judged {', '.join(MODES)}: {wrong} files with a mistake")
    return 1 if wrong else 0


def _row(judged: Judged, folder: Path, wide: int) -> str:
    """A table row: file, rows that pyarrow reads, and each mode's verdict and rows."""
    rows = "-" if judged.expected.rows is None else judged.expected.rows
    told = (f"{a.verdict} ({'-' if a.rows is None else a.rows})" for a in judged.answers.values())
    return f"{judged.path.relative_to(folder)!s:{wide}}  {rows:>9}  " + "  ".join(f"{text:18}" for text in told)


def _told(way: Callable[..., list[str]], *what: object) -> Iterator[str]:
    """The mistakes; an exception is one as well, and the other tables are judged all the same."""
    try:
        yield from way(*what)
    except Exception as error:
        yield f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _spark() -> SparkSession:
    session: SparkSession = (
        local_spark("local[*]", "distop oracle")
        # Thousands of tiny queries: compiling them well costs more than running them.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        # What a check means must not depend on it.
        .config("spark.sql.session.timeZone", "Asia/Kathmandu")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    return session


if __name__ == "__main__":
    sys.exit(main())
