"""Operation types with an operation id: one for the whole type, and one by argument with combined arguments."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from distop.behavior import Behavior, PartitionPlan, Planned

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord


class PurgeArg(BaseModel):
    """``path``: the folder to purge, which is the operation id; ``files``: its files.

    Jobs run until the file ``hold`` exists.
    """

    model_config = ConfigDict(extra="forbid")

    path: str = ""
    files: list[str] = []
    hold: str = ""


class CleanUp(Behavior):
    """All operations of this type have the same operation id."""

    type_name = "clean-up"
    Arg = PurgeArg
    id_fields = ()

    def start_or_resume_job(self, arg: PurgeArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        while arg.hold and not Path(arg.hold).exists():
            ctx.check_cancelled()
            time.sleep(0.005)


class PurgePath(CleanUp):
    """Reports the files of its combined argument."""

    type_name = "purge-path"
    Arg = PurgeArg
    id_fields = ("path",)
    combine: ClassVar[Any] = {"files": "union"}

    def partitions(self, table: TableRecord, arg: PurgeArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(0, "all of it")])

    def complete_operation(self, arg: PurgeArg, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        return {"files": arg.files}
