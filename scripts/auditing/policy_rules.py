"""Rules of policies: commands, evaluations, and the operations that policies start."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from auditing.content import STATE, Finding
from auditing.records import quoted, record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from auditing.content import Changes, Content
    from auditing.records import OperationName

MARK = "distOpNotice.policies"
BY_POLICY = "policy:"
"""The prefix of the request ids, and of the submitters, of operations that policies start."""
MOST = {"evaluations": 20, "consumed": 50, "waiting": 50}
"""How many entries the lists of a policy's records may have."""
NEAR = 0.005
"""Seconds by which times may differ: those of evaluations have milliseconds."""


def _written(content: Content, family: str) -> Iterator[tuple[str, str]]:
    """(key, what follows its family) of the keys of a family that this revision wrote."""
    for key in content.replaced:
        head, _, rest = key.partition(".")
        if head == family:
            yield key, rest


def _record(text: str | None) -> dict[str, Any]:
    return record(text) if text is not None else {}


def commands(content: Content, touched: Mapping[OperationName, Changes]) -> Iterator[Finding]:
    """A policy is made with the mark, a removed one stays removed, and only ``resume`` ends a pause."""
    for key, rest in _written(content, "distOpPolicy"):
        former, now = _record(content.before(key)), _record(content.others.get(key))
        if former and not now:
            content.removed_policies.add(former["uid"])
            left = [
                name for name in (f"distOpPolicyState.{rest}", f"distOpPolicyEvent.{rest}") if name in content.others
            ]
            if left:
                yield Finding("policies", key, f"was removed, and {left[0]} is left")
        elif now and not former:
            if now["uid"] in content.removed_policies:
                yield Finding("policies", key, "was removed, and is there again")
            if MARK not in content.replaced:
                yield Finding("policies", key, "was made without the mark")
        elif former.get("paused") and not now.get("paused"):
            counts = [len(one.get("actions", ())) + one.get("actions_dropped", 0) for one in (former, now)]
            if counts[0] == counts[1] or now["actions"][-1]["action"] != "resume_policy":
                yield Finding("policies", key, "is active again, and nobody resumed it")
        if former and now and former["uid"] != now["uid"]:
            yield Finding("policies", key, "has another uid than before")
    for key, rest in _written(content, "distOpPolicyEvent"):
        waiting = len(_record(content.others.get(key)).get("waiting", ()))
        if waiting > MOST["waiting"]:
            yield Finding("policies", key, f"{waiting} events wait")
        if key in content.others and f"distOpPolicy.{rest}" not in content.others:
            yield Finding("policies", key, "exists without its policy")


def evaluations(content: Content, touched: Mapping[OperationName, Changes]) -> Iterator[Finding]:
    """The elected evaluator alone evaluates, only active policies, and consumes what it has evaluated, once."""
    for key, rest in _written(content, "distOpPolicyState"):
        before, state = content.before(key), _record(content.others.get(key))
        policy = f"distOpPolicy.{rest}"
        if before is None or key not in content.others:
            if key in content.others and (content.before(policy) is not None or policy not in content.others):
                yield Finding("evaluations", key, "was made without its policy")
            continue
        rules = _record(content.others.get(policy))
        if not rules or policy in content.replaced:
            yield Finding("evaluations", key, "was written although its policy is absent or was changed by a command")
            continue
        if rules.get("paused"):
            yield Finding("evaluations", key, "was written during a pause")
        elected = f"distOpPolicyEvaluator.{rest.split('.')[0]}"
        evaluator = content.others.get(elected) if elected not in content.replaced else None
        last = state.get("evaluations", [{}])[-1]
        if evaluator is None or last.get("evaluator") != evaluator:
            text = f"was written by {last.get('evaluator')}, but the elected evaluator is {evaluator}"
            yield Finding("evaluations", key, text)
        for name in ("evaluations", "consumed"):
            if len(state.get(name, ())) > MOST[name]:
                yield Finding("evaluations", key, f"keeps {len(state[name])} {name}")
        for text in _consumption(content, rest, rules, _record(before), state, last):
            yield Finding("evaluations", key, text)


def _consumption(
    content: Content, rest: str, rules: Mapping[str, Any], former: dict[str, Any], state: dict[str, Any], last: Any
) -> Iterator[str]:
    """What is wrong with the triggers that an evaluation consumed."""
    changed = [name for name in ("every_at", "version", "consumed", "op") if former.get(name) != state.get(name)]
    if last.get("verdict") not in ("started", "no"):
        if changed:
            yield f"changed {', '.join(changed)} with the verdict {last.get('verdict')}"
        return
    events = f"distOpPolicyEvent.{rest}"
    waited = {one["id"] for one in _record(content.before(events)).get("waiting", ())}
    waits = {one["id"] for one in _record(content.others.get(events)).get("waiting", ())}
    for trigger in last.get("triggers", ()):
        kind, _, what = trigger.partition("@")
        if kind == "version" and what == former.get("version"):
            yield f"evaluated the version {what} again"
        elif kind == "every" and "every_at" not in changed:
            yield "evaluated an interval that it did not count"
        elif kind.startswith("event:") and (what not in waited or what in waits):
            yield f"evaluated the event {what}, which did not wait before, or waits after"
    if "version" in changed and last.get("inputs", {}).get("version") != state.get("version"):
        yield f"noted the version {state.get('version')}, but looked at {last.get('inputs', {}).get('version')}"
    if "every_at" in changed:
        began, every = state["every_at"], rules.get("every", 0.0)
        passed = began - former.get("every_at", began - every)
        past = datetime.fromisoformat(last["time"]).timestamp() - began
        if -NEAR < passed < every - NEAR or past > every + NEAR:
            yield f"counted the interval at {began}: {passed:g} s after the former, {past:g} s before its evaluation"


def starts(content: Content, touched: Mapping[OperationName, Changes]) -> Iterator[Finding]:
    """An operation of a policy is started in the revision of the evaluation that names it, by an active policy."""
    made: dict[str, str] = {}
    for name, changed in touched.items():
        spec = content.operations[name].spec
        if STATE not in changed or changed[STATE].before is not None or not _of_policy(spec):
            continue
        rest = f"{quoted(name.table)}.{quoted(spec['submitter'].removeprefix(BY_POLICY))}"
        state, policy = f"distOpPolicyState.{rest}", _record(content.before(f"distOpPolicy.{rest}"))
        last = _record(content.others.get(state)).get("evaluations", [{}])[-1]
        if not policy or policy.get("paused"):
            yield Finding("starts of policies", str(name), f"was started by {unquote(rest)}, which is paused or absent")
        elif state not in content.replaced or last.get("op") != str(name) or last.get("verdict") != "started":
            yield Finding("starts of policies", str(name), f"was started by {unquote(rest)}, which recorded no start")
        elif policy["start"] != name.type:
            yield Finding(
                "starts of policies", str(name), f"was started by {unquote(rest)}: not of the type of its start"
            )
        made[state] = str(name)
    for key, _ in _written(content, "distOpPolicyState"):
        op = _record(content.others.get(key)).get("op")
        if op != _record(content.before(key)).get("op") and op != made.get(key) and key in content.others:
            yield Finding("starts of policies", key, f"names {op}, which was not started in this revision")


def _of_policy(spec: Mapping[str, Any]) -> bool:
    return str(spec.get("request_id", "")).startswith(BY_POLICY)
