"""An operation type of the tests whose id is computed from its argument, and whose arguments are combined by rule."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from distop.behavior import Behavior, PartitionPlan, Planned

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord


class PurgeArg(BaseModel):
    """``path``: what is purged, which is the id; ``files``: what of it. A job runs until the file ``hold`` exists."""

    model_config = ConfigDict(extra="forbid")

    path: str = ""
    files: list[str] = []
    hold: str = ""


class CleanUp(Behavior):
    """Cleans up the backend: of such an operation one is enough."""

    type_name = "clean-up"
    Arg = PurgeArg
    id_fields = ()

    def start_or_resume_job(self, arg: PurgeArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        while arg.hold and not Path(arg.hold).exists():
            ctx.check_cancelled()
            time.sleep(0.005)


class Purge(CleanUp):
    """Purges what it is told, and reports that."""

    type_name = "purge"
    Arg = PurgeArg
    id_fields = ("path",)
    combine: ClassVar[Any] = {"files": "union"}

    def partitions(self, table: TableRecord, arg: PurgeArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(0, "all of it")])

    def complete_operation(self, arg: PurgeArg, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        return {"files": arg.files}
