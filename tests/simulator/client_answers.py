"""What clients were told, held against what etcd's history says of it in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from tests.simulator.clients import Told


def broken(
    told: Told,
    accepted: Collection[str],
    requests: Mapping[str, str],
    ids: Mapping[str, str],
    ended: Mapping[str, str],
    forgotten: Collection[str],
) -> Iterator[tuple[str, str, str]]:
    """(kind, operation, text) of each breach. ``accepted``: the operations that began; ``requests``: operation → the
    request that began it; ``ids``: operation → its id; ``ended``: operation → the state in which it ended;
    ``forgotten``: operations whose history record was pruned (invariant 14 judges whether that was too early).
    """
    for request, op in told.started.items():
        if op not in accepted:
            yield "acknowledged and lost", op, f"{request} was told that {op} began, and it never did"
        elif requests.get(op) != request and (request not in told.of_ids or ids.get(op) != told.of_ids[request]):
            yield "told of another's", op, f"{request} was told that it began {op}, which {requests.get(op)} did"
    for op, state in told.ended.items():
        if ended.get(op) != state:
            yield "told wrong", op, f"a client was told {state}; the history says {ended.get(op)}"
    for op, text in told.not_found.items():
        if op not in forgotten:
            yield "surprise", op, f"its client did not find it: {text}"
    for text in told.surprises:
        yield "surprise", "", text
