"""The smallest behavior: returns the size in bytes of each partition."""

from pydantic import BaseModel

from distop.behavior import Behavior


class Arg(BaseModel):
    pass


class PartitionSize(Behavior):
    type_name = "partition_size"
    Arg = Arg

    def start_or_resume_job(self, arg, partition, ctx):
        return sum(size for _, size, _ in partition.files)
