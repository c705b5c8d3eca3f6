"""``join``: an operation that only waits for other operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from distop.behavior import Behavior

if TYPE_CHECKING:
    from distop.behavior import JobContext, PartitionPlan


class JoinArg(BaseModel):
    """``join`` has no arguments."""

    model_config = ConfigDict(extra="forbid")


class Join(Behavior):
    """Ends when the last of the operations that it waits for ends."""

    type_name = "join"
    Arg = JoinArg
    joins = True

    def start_or_resume_job(self, arg: JoinArg, partition: PartitionPlan, ctx: JobContext) -> None:
        """Do nothing. Runs only if the operation was started without others to wait for."""
