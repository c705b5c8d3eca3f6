"""A behavior whose jobs take memory or threads until their limit. It runs in containers, which have no tests."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from distop.behavior import Behavior, PartitionPlan, Planned

if TYPE_CHECKING:
    from distop.behavior import JobContext, TableRecord

BLOCK = 64
"""Megabytes of one array of the JVM."""


class GreedyArg(BaseModel):
    """What the one job of an operation takes: megabytes of the JVM, and threads."""

    megabytes: int = 0
    threads: int = 0


class Greedy(Behavior):
    """Takes memory of the JVM, or threads."""

    type_name = "greedy"
    Arg = GreedyArg

    def partitions(self, table: TableRecord, arg: GreedyArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(0, "all")])

    def start_or_resume_job(self, arg: GreedyArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        gateway = ctx.spark.sparkContext._gateway
        arrays = [gateway.new_array(gateway.jvm.byte, BLOCK << 20) for _ in range(arg.megabytes // BLOCK)]
        ended = threading.Event()
        try:
            for _ in range(arg.threads):
                threading.Thread(target=ended.wait, daemon=True).start()
        finally:
            ended.set()
        return len(arrays)
