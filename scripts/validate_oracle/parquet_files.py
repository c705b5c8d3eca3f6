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
from scripts.validate_oracle.parquet_reader import Expected, expect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODES = ("only", "auto", "never")
DEADLINE = 300.0
READ_BY_SPARK = {"ARROW-GH-45185.parquet": "Spark accepts a first repetition level of 1 as the start of a row"}
"""Files that Spark reads completely but pyarrow cannot read, and why: their rows are not compared."""


@dataclass
class Answer:
    """The result of validate for a file in one mode: its report, or why there is none (``failure``)."""

    rows: int | None = None
    checks: list[dict[str, Any]] = field(default_factory=list)
    message: str = ""
    failure: str = ""

    @property
    def verdict(self) -> str:
        """The worst verdict of the checks, or ``failure``."""
        found = {check["verdict"] for check in self.checks}
        if self.failure:
            return "failure"
        return next((v for v in ("violated", "error", "unknown") if v in found), "valid")


@dataclass
class FileResult:
    """One file: its content, the results of validate by mode, and their mistakes."""

    path: Path
    expected: Expected
    answers: dict[str, Answer]
    mistakes: list[str]


class Validator:
    """A process that validates one file after the other; a new one is started if it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def validate(self, path: Path, checks: Sequence[dict[str, Any]], mode: str) -> Answer:
        """The result of validate for the file.

        Like an executor, it retries once if the process died.
        """
        found = self._validate(path, checks, mode, again=False)
        return self._validate(path, checks, mode, again=True) if found.failure else found

    def _validate(self, path: Path, checks: Sequence[dict[str, Any]], mode: str, *, again: bool) -> Answer:
        process, lines = self._running()
        assert process.stdin is not None
        process.stdin.write(json.dumps([str(path), list(checks), mode, again]) + "\n")
        process.stdin.flush()
        try:
            line = lines.get(timeout=DEADLINE)
        except queue.Empty:
            self.close()
            return Answer(failure=f"no answer within {DEADLINE:.0f} s")
        if line is None:
            code = process.wait()
            self.close()
            return Answer(failure=f"the process ended with {code}")
        found = Answer(**json.loads(line))
        if found.failure:
            self.close()  # its JVM may have ended
        return found

    def _running(self) -> tuple[subprocess.Popen[str], queue.Queue[str | None]]:
        if self._process is None:
            command = [sys.executable, "-m", "scripts.validate_oracle.parquet_files"]
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


def check_all(files: Sequence[Path]) -> Iterator[FileResult]:
    """Check the files in order."""
    validator = Validator()
    try:
        for path in files:
            yield check_file(path, validator)
    finally:
        validator.close()


def parquet_files(folder: Path) -> list[Path]:
    """The files below a folder with Parquet names, including encrypted ones."""
    return sorted(p for p in folder.rglob("*.parquet*") if p.name.endswith((".parquet", ".parquet.encrypted")))


def check_file(path: Path, validator: Validator) -> FileResult:
    """Check one file in each mode."""
    expected = expect(path)
    expected.checks = expected.checks[:MAX_CHECKS]
    checks = [check for check, _ in expected.checks] or [{"not_null": "id"}]
    answers = {mode: validator.validate(path, checks, mode) for mode in MODES}
    return FileResult(path, expected, answers, list(mistakes(path, expected, answers)))


def mistakes(path: Path, expected: Expected, answers: dict[str, Answer]) -> Iterator[str]:
    """Mistakes in the results of validate.

    If the independent reader cannot read a file, a mode that reads all rows must report an error that names the file.
    Statistics may decide checks of such a file, as long as no other mode decides the opposite.
    """
    for mode, answer in answers.items():
        if answer.failure:
            yield f"{mode}: {answer.failure}"
        for check in answer.checks:
            if check["verdict"] == "error" and path.name not in (check["error"] or ""):
                yield f"{mode}: {check['check']}: the error does not name the file: {check['error']}"
    never = answers["never"]
    if expected.rows is None:
        if path.name not in READ_BY_SPARK and any(check["verdict"] != "error" for check in never.checks):
            yield f"never: {never.verdict}, but the file cannot be read: {expected.error}"
    elif not never.failure and never.verdict != "error" and never.rows != expected.rows:
        yield f"never: {never.rows} rows, not {expected.rows}"
    for n, (check, violations) in enumerate(expected.checks):
        found = {mode: answer.checks[n] for mode, answer in answers.items() if len(answer.checks) > n}
        verdicts = {mode: entry["verdict"] for mode, entry in found.items()}
        if {"valid", "violated"} <= set(verdicts.values()):
            yield f"{check}: {verdicts}"
        if verdicts.get("only") in ("valid", "violated") and verdicts.get("auto") != verdicts["only"]:
            yield f"{check}: auto lost the verdict of only: {verdicts}"
        if violations is None:
            continue
        for mode, entry in found.items():
            counted, exact = entry["violations"], entry["exact"]
            if entry["verdict"] == "valid" and violations:
                yield f"{mode}: {check}: valid, but {violations} rows violate it"
            right = counted == violations or (0 < counted < violations and not exact)
            if entry["verdict"] == "violated" and not (counted and right):
                yield f"{mode}: {check}: {counted} violations (exact: {exact}), not {violations}"


def main() -> int:
    """Validate each file whose path is read from the standard input."""
    from distop.behavior import TableRecord
    from distop_behaviors.validate import Validate
    from tests.support.context import FakeContext, run_operation
    from tests.support.localspark import FRUGAL, local_spark

    # The JVM prints to the standard output when it ends, so the results use a copy of that descriptor.
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
                found = {"failure": f"{type(error).__name__}: {text}"}
        print(json.dumps(found), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
