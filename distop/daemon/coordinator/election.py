"""What the steps of a coordinator share while it is elected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.daemon.incarnation_context import Context
    from distop.decide.view import TypeView
    from distop.protocol.records import OperationRef
    from distop.protocol.state_tables import Stage
    from distop.protocol.txn import Compare, Txn

    Call = Callable[[OperationRef, Stage, Callable[[], Awaitable[Any]]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Election:
    """What the steps of a coordinator share while it is elected.

    ``guard``: compares that it is still elected. ``commit`` sends a transaction, waits until the coordinator's ``view``
    has reached it, and returns whether it was applied. ``reached`` only waits (W11). ``call`` makes a call into the
    child, which ends when the operation leaves its stage.
    """

    ctx: Context
    guard: Compare
    view: TypeView
    commit: Callable[[Txn], Awaitable[bool]]
    reached: Callable[[int], Awaitable[None]]
    call: Call


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What a coordinator reports.

    ``failed``: a watch has failed, so that coordination cannot continue. ``trouble``: a call into the child failed, and
    another node may do better. ``elsewhere``: the next step needs a node with other labels; it returns False if the
    election cannot be given up yet.
    """

    failed: Callable[[BaseException], None]
    trouble: Callable[[], None]
    elsewhere: Callable[[], bool]
