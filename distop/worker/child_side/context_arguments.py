"""Checks the arguments of a context's methods, as the client checks those of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol.caller_values import delay_seconds, partition_names, text
from distop.protocol.dependencies import follows_elsewhere
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import loads
from distop.protocol.records import CLUSTER_TABLE, OperationRef
from distop.protocol.texts import shown
from distop.schemas.argument_schema import encode_argument

if TYPE_CHECKING:
    from collections.abc import Mapping


@frozen
class FollowUp:
    """A follow-up operation. ``delay``: seconds from now; 0: at once."""

    type: str
    table: str
    arg: Any
    partitions: tuple[str, ...] | None
    delay: float

    def to_json(self) -> Mapping[str, Any]:
        """Its entry in a decision, without the time of its start."""
        names = list(self.partitions) if self.partitions is not None else None
        return {"type": self.type, "table": self.table, "arg": self.arg, "partitions": names}


def follow_up(operation: str, type_name: Any, table: Any, arg: Any, partitions: Any, delay: Any) -> FollowUp:
    """The checked follow-up of ``operation``. Raises InvalidArgument, also for another table than its own."""
    K.check_type_name(text(type_name, "the operation type"))
    K.encode(text(table, "the name of a table"))
    if why := follows_elsewhere(OperationRef.parse(operation), table):
        raise InvalidArgument(why)
    names = partition_names(partitions) if partitions is not None else None
    if names is not None and table == CLUSTER_TABLE:
        raise InvalidArgument(f"an operation on {CLUSTER_TABLE} has a single job: leave out the partitions")
    if hasattr(arg, "model_dump"):
        arg = arg.model_dump(mode="json")
    value = loads(encode_argument(arg)) if arg is not None else None
    return FollowUp(type_name, table, value, names, delay_seconds(delay) if delay is not None else 0.0)


def ended_operation(op: Any) -> str:
    """The name of an operation whose history record is read. Raises InvalidArgument."""
    OperationRef.parse(text(op, "the name of an operation"))
    return str(op)


def table_name(name: Any) -> str:
    """The name of another table. Raises InvalidArgument."""
    return text(name, "the name of a table")


def status_text(status: Any) -> str:
    """A status. Raises InvalidArgument for a value that is no text."""
    if not isinstance(status, str):
        raise InvalidArgument(f"the status must be a text, not {shown(status)}")
    return status
