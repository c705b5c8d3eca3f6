"""Checks the answers that clients got against etcd's history, at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from tests.simulator.clients import ClientAnswers


def wrong_answers(
    answers: ClientAnswers,
    accepted: Collection[str],
    requests: Mapping[str, str],
    ids: Mapping[str, str],
    ended: Mapping[str, str],
    forgotten: Collection[str],
) -> Iterator[tuple[str, str, str]]:
    """(kind, operation, text) of each breach.

    ``accepted``: the started operations; ``requests``: operation → the request that started it; ``ids``: operation →
    its id; ``ended``: operation → its final state; ``forgotten``: operations whose history record was pruned (invariant
    14 judges whether that was too early).
    """
    for request, op in answers.started.items():
        if op not in accepted:
            yield "acknowledged start lost", op, f"{request} was told that {op} had started, but it never did"
        elif requests.get(op) != request and (request not in answers.of_ids or ids.get(op) != answers.of_ids[request]):
            yield "wrong operation", op, f"{request} was told that it had started {op}, but {requests.get(op)} had"
    for op, state in answers.ended.items():
        if ended.get(op) != state:
            yield "wrong answer", op, f"a client was told {state}; the history record has {ended.get(op)}"
    for op, text in answers.not_found.items():
        if op not in forgotten:
            yield "unexpected client error", op, f"its client did not find it: {text}"
    for text in answers.surprises:
        yield "unexpected client error", "", text
