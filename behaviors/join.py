"""``join``: an operation that does nothing but wait for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from distop.behavior import Behavior

if TYPE_CHECKING:
    from distop.behavior import JobContext, PartitionPlan


class JoinArg(BaseModel):
    """Nothing."""

    model_config = ConfigDict(extra="forbid")


class Join(Behavior):
    """Ends with the last of the operations that it waits for."""

    type_name = "join"
    Arg = JoinArg
    joins = True

    def start_or_resume_job(self, arg: JoinArg, partition: PartitionPlan, ctx: JobContext) -> None:
        """Of one that was started to wait for nobody."""
