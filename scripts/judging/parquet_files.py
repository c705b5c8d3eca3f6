"""Validate on single Parquet files, compared with an independent reader."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop_behaviors.validate.validate_argument import MAX_CHECKS
from scripts.judging.parquet_reader import Expected, expect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODES = ("only", "auto", "never")
DEADLINE = 300.0
READ_BY_SPARK = {"ARROW-GH-45185.parquet": "Spark takes a first repetition level of 1 for the beginning of a row"}
"""Files whose rows Spark reads, all of them, and pyarrow does not, and why: nothing else is compared of their rows."""


@dataclass
class Answer:
    """The result of validate for a file in one mode.

    Its report, or how it ended without one (``trouble``).
    """

    rows: int | None = None
    checks: list[dict[str, Any]] = field(default_factory=list)
    message: str = ""
    trouble: str = ""

    @property
    def verdict(self) -> str:
        """The worst of its checks, or ``trouble``."""
        found = {check["verdict"] for check in self.checks}
        return "trouble" if self.trouble else next((v for v in ("violated", "error", "unknown") if v in found), "valid")


@dataclass
class Judged:
    """One file: what it holds, what validate says by mode, and where that is wrong."""

    path: Path
    expected: Expected
    answers: dict[str, Answer]
    mistakes: list[str]


class Validating:
    """A process that validates one file after the other; it is replaced where it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def ask(self, path: Path, checks: Sequence[dict[str, Any]], mode: str) -> Answer:
        """The result of validate for the file.

        Like an executor, it runs once more where the process died.
        """
        found = self._ask(path, checks, mode, again=False)
        return self._ask(path, checks, mode, again=True) if found.trouble else found

    def _ask(self, path: Path, checks: Sequence[dict[str, Any]], mode: str, *, again: bool) -> Answer:
        process, lines = self._running()
        assert process.stdin is not None
        process.stdin.write(json.dumps([str(path), list(checks), mode, again]) + "\n")
        process.stdin.flush()
        try:
            line = lines.get(timeout=DEADLINE)
        except queue.Empty:
            self.close()
            return Answer(trouble=f"no answer within {DEADLINE:.0f} s")
        if line is None:
            code = process.wait()
            self.close()
            return Answer(trouble=f"the process ended with {code}")
        found = Answer(**json.loads(line))
        if found.trouble:
            self.close()  # its JVM may be gone
        return found

    def _running(self) -> tuple[subprocess.Popen[str], queue.Queue[str | None]]:
        if self._process is None:
            command = [sys.executable, "-m", "scripts.judging.parquet_files"]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            lines: queue.Queue[str | None] = queue.Queue()

            def read() -> None:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.put(line)
                lines.put(None)

            threading.Thread(target=read, daemon=True).start()
            self._process, self._lines = process, lines
        return self._process, self._lines

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def judge_all(files: Sequence[Path]) -> Iterator[Judged]:
    """The files, in order."""
    validating = Validating()
    try:
        for path in files:
            yield judge(path, validating)
    finally:
        validating.close()


def parquet_files(folder: Path) -> list[Path]:
    """The files below a folder with Parquet names, encrypted ones included."""
    return sorted(p for p in folder.rglob("*.parquet*") if p.name.endswith((".parquet", ".parquet.encrypted")))


def judge(path: Path, validating: Validating) -> Judged:
    """One file in each mode."""
    expected = expect(path)
    expected.checks = expected.checks[:MAX_CHECKS]
    checks = [check for check, _ in expected.checks] or [{"not_null": "id"}]
    answers = {mode: validating.ask(path, checks, mode) for mode in MODES}
    return Judged(path, expected, answers, list(mistakes(path, expected, answers)))


def mistakes(path: Path, expected: Expected, answers: dict[str, Answer]) -> Iterator[str]:
    """What is wrong of what validate says.

    A file that the independent reader cannot read is an error where all rows are to be read, and the error names the
    file. What statistics alone prove of such a file may stand, as long as no other mode proves the opposite.
    """
    for mode, answer in answers.items():
        if answer.trouble:
            yield f"{mode}: {answer.trouble}"
        for check in answer.checks:
            if check["verdict"] == "error" and path.name not in (check["error"] or ""):
                yield f"{mode}: {check['check']}: the error does not name the file: {check['error']}"
    never = answers["never"]
    if expected.rows is None:
        if path.name not in READ_BY_SPARK and any(check["verdict"] != "error" for check in never.checks):
            yield f"never: {never.verdict}, and the file cannot be read: {expected.error}"
    elif not never.trouble and never.verdict != "error" and never.rows != expected.rows:
        yield f"never: {never.rows} rows, not {expected.rows}"
    for n, (check, violations) in enumerate(expected.checks):
        found = {mode: answer.checks[n] for mode, answer in answers.items() if len(answer.checks) > n}
        verdicts = {mode: entry["verdict"] for mode, entry in found.items()}
        if {"valid", "violated"} <= set(verdicts.values()):
            yield f"{check}: {verdicts}"
        if verdicts.get("only") in ("valid", "violated") and verdicts.get("auto") != verdicts["only"]:
            yield f"{check}: {verdicts}: lost in auto"
        if violations is None:
            continue
        for mode, entry in found.items():
            counted, exact = entry["violations"], entry["exact"]
            if entry["verdict"] == "valid" and violations:
                yield f"{mode}: {check}: valid, and {violations} rows violate it"
            right = counted == violations or (0 < counted < violations and not exact)
            if entry["verdict"] == "violated" and not (counted and right):
                yield f"{mode}: {check}: {counted} violations (exact: {exact}), not {violations}"


def main() -> int:
    """Validate each file whose path comes in."""
    from distop.behavior import TableRecord
    from distop_behaviors.validate import Validate
    from tests.support.context import FakeContext, run_operation
    from tests.support.localspark import FRUGAL, local_spark

    # A JVM that ends says so on the standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    java = f"{FRUGAL} -XX:+ExitOnOutOfMemoryError"  # as in executors
    session = local_spark("local[2]", "distop files").config("spark.driver.extraJavaOptions", java).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    for line in sys.stdin:
        path, checks, mode, again = json.loads(line)
        with tempfile.TemporaryDirectory(prefix="distop-file-") as folder:
            table, work = Path(folder) / "table", Path(folder) / "work"
            table.mkdir()
            work.mkdir()
            shutil.copy2(path, table)
            record = TableRecord("t", "parquet", str(table))

            def context(table: TableRecord, work: Path = work, again: bool = again) -> FakeContext:
                made = FakeContext(work, table, session)
                made.again = again
                return made

            try:
                arg = {"checks": checks, "statistics": mode, "sample": 2}
                ran = run_operation(Validate(), record, arg, context)
                found = {"rows": ran.report["rows"], "checks": ran.report["checks"], "message": ran.message}
            except Exception as error:
                text = str(error).strip().split("\n")[0]
                found = {"trouble": f"{type(error).__name__}: {text}"}
        print(json.dumps(found), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
