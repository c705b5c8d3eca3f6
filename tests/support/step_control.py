"""Controls operations of the type ``steps`` from a test: reads their diary and releases their jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


class Steps:
    """The folder that the jobs of one operation write to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def arg(self, *names: str, **fields: Any) -> dict[str, Any]:
        return {"names": list(names), "folder": str(self.folder), **fields}

    def diary(self) -> list[str]:
        """The log of all jobs, in order: ``start NAME at N attempt A``, ``step NAME N``, ``clean NAME``."""
        file = self.folder / "diary.txt"
        return file.read_text().splitlines() if file.exists() else []

    def at(self, name: str, step: int) -> bool:
        """Whether the job has finished this step."""
        return f"step {name} {step}" in self.diary()

    def starts(self, name: str) -> list[int]:
        """The checkpoint from which each attempt at a job started."""
        lines = [line.split() for line in self.diary() if line.startswith(f"start {name} ")]
        return [int(fields[3]) for fields in lines]

    def go(self, name: str, *steps: int) -> None:
        """Release a job at these steps."""
        for step in steps:
            (self.folder / f"go-{name}-{step}").touch()

    def output(self, name: str) -> list[str]:
        """The lines that the job has written."""
        file = self.folder / f"out-{name}"
        return file.read_text().split() if file.exists() else []


ALL = ["1", "2", "3", "4", "5"]
"""The output of a job that ran all steps once."""
