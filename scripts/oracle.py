"""Compares validate with a check in plain Python on generated tables; see ``scripts/oracle --help``."""

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
from scripts.validate_oracle.parquet_files import MODES, FileResult, check_all, parquet_files
from scripts.validate_oracle.random_tables import ODD_NAMES, generate
from scripts.validate_oracle.row_oracle import mistakes, mistakes_with_condition, mistakes_with_failing_check
from tests.support.context import FakeContext
from tests.support.localspark import local_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAYS = {
    "only": partial(mistakes, mode="only"),
    "auto": partial(mistakes, mode="auto"),
    "never": partial(mistakes, mode="never"),
    "where": mistakes_with_condition,
    "beside": mistakes_with_failing_check,
}
"""Ways to run validate: the values of ``statistics``, with a condition on rows, and with another check that fails."""

PARQUET_TESTING = "https://github.com/apache/parquet-testing/tree/1a2a75127be06fc0123f03ebd36c966f7beda27d"
"""Parquet files to check before a release, at a fixed commit: later commits add and change files."""

SHOWN = 5
"""Maximum mistakes printed for one file."""


def main(args: Sequence[str] | None = None) -> int:
    """Run; returns 0 if validate is right on all tables, else 1."""
    parser = argparse.ArgumentParser(
        prog="scripts/oracle",
        description="Generate tables with difficult contents, check each row in plain Python, and compare the result "
        "with validate: by statistics alone, by statistics and scans, by full scans, on rows that a condition selects, "
        "and together with an expression that fails in Spark.",
    )
    parser.add_argument("--tables", type=int, default=500, metavar="N", help="number of seeds (default 500)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the first seed (default 1)")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="the ways to run validate (default: all)"
    )
    parser.add_argument(
        "--parquet-files",
        type=Path,
        metavar="DIR",
        help="compare validate with pyarrow's reading of each Parquet file below this folder instead; damaged and "
        f"encrypted files are allowed (for example a clone of {PARQUET_TESTING})",
    )
    options = parser.parse_args(args)
    if options.parquet_files is not None:
        return check_files(options.parquet_files)
    begun, wrong, checks = time.perf_counter(), 0, 0
    seeds = range(options.seed, options.seed + options.tables)
    session = None if options.ways == ["only"] else _spark()
    for seed in seeds:
        found, count = check_seed(seed, options.ways, session)
        checks += count
        wrong += bool(found)
        for line in found:
            print(f"seed {seed}: {line}", flush=True)
        if seed % 25 == 0:
            print(f"seed {seed}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    print(
        f"{len(seeds)} tables (seeds {seeds[0]} to {seeds[-1]}), {checks} checks, compared {', '.join(options.ways)}: "
        f"{wrong} tables with a mistake"
    )
    return 1 if wrong else 0


def check_seed(seed: int, ways: Sequence[str], session: SparkSession | None) -> tuple[list[str], int]:
    """The mistakes on the table of a seed, and its number of checks."""
    with tempfile.TemporaryDirectory(prefix="distop-oracle-") as folder:
        made = generate(seed, Path(folder) / ODD_NAMES[seed % len(ODD_NAMES)])
        work = Path(folder) / "work"
        work.mkdir()

        def context(table: TableRecord) -> FakeContext:
            return FakeContext(work, table, session)

        found: list[str] = []
        for way in ways:
            found += [f"{way}: {line}" for line in _mistakes(WAYS[way], made, context)]
        return found, len(made.cases)


def check_files(folder: Path) -> int:
    """Print a row for each Parquet file below a folder.

    Returns 0 if validate is right on all of them, else 1.
    """
    files = parquet_files(folder)
    if not files:
        print(f"no Parquet file found below {folder}", file=sys.stderr)
        return 1
    wide = max(len(str(path.relative_to(folder))) for path in files)
    print(f"{'file':{wide}}  {'rows':>9}  " + "  ".join(f"{mode:18}" for mode in MODES))
    wrong = 0
    for result in check_all(files):
        print(_row(result, folder, wide), flush=True)
        wrong += bool(result.mistakes)
        for mistake in result.mistakes[:SHOWN]:
            print(f"    {mistake}", flush=True)
        if len(result.mistakes) > SHOWN:
            print(f"    and {len(result.mistakes) - SHOWN} more", flush=True)
    print(f"{len(files)} files, each compared {', '.join(MODES)}: {wrong} files with a mistake")
    return 1 if wrong else 0


def _row(result: FileResult, folder: Path, wide: int) -> str:
    """A table row: file, rows that pyarrow reads, and each mode's verdict and rows."""
    rows = "-" if result.expected.rows is None else result.expected.rows
    answers = (f"{a.verdict} ({'-' if a.rows is None else a.rows})" for a in result.answers.values())
    return f"{result.path.relative_to(folder)!s:{wide}}  {rows:>9}  " + "  ".join(f"{text:18}" for text in answers)


def _mistakes(way: Callable[..., list[str]], *what: object) -> Iterator[str]:
    """The mistakes of one way. An exception counts as a mistake, so that the other tables are still checked."""
    try:
        yield from way(*what)
    except Exception as error:
        yield f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _spark() -> SparkSession:
    session: SparkSession = (
        local_spark("local[*]", "distop oracle")
        # With thousands of tiny queries, optimizing compilation costs more than it saves.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        # Results of checks must not depend on the time zone.
        .config("spark.sql.session.timeZone", "Asia/Kathmandu")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    return session


if __name__ == "__main__":
    sys.exit(main())
