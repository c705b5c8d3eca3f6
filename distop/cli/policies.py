"""Commands on policies: set, list, show, pause, resume and remove them; emit events; the autopilot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from distop.cli import output
from distop.cli.command_context import current, parse_argument
from distop.cli.command_options import count
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.services.policies import PolicyStatus

NAME = Annotated[str, typer.Argument(metavar="NAME", help="The policy's name.")]
TABLE = Annotated[str, typer.Argument(metavar="TABLE", help="A registered table.")]


def set_policy(
    name: NAME,
    table: TABLE,
    start: Annotated[str, typer.Option(metavar="TYPE", help="The type of the operation; see `distop behaviors`.")],
    arg: Annotated[str | None, typer.Option(metavar="JSON|@FILE", help="JSON, or a file with it (@-: stdin).")] = None,
    every: Annotated[str | None, typer.Option(metavar="TIME", help="Due in this interval: 1h, 7d, or seconds.")] = None,
    on: Annotated[
        list[str] | None, typer.Option(metavar="TRIGGER", help="Due on: version, or event:NAME (repeatable).")
    ] = None,
    when: Annotated[
        str | None, typer.Option(metavar="CONDITION", help="Start only if it holds: 'small_files > 50'.")
    ] = None,
    priority: Annotated[int | None, typer.Option(metavar="N", help="Priority of the operation, -100 to 100.")] = None,
    max_jobs: Annotated[
        int | None, typer.Option(metavar="N", parser=count("--max-jobs"), help="Maximum jobs at once.")
    ] = None,
    max_jobs_per_executor: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=count("--max-jobs-per-executor"), help="Maximum jobs at once on each executor."
        ),
    ] = None,
    max_failed: Annotated[str | None, typer.Option(metavar="N|N%", help="Tolerate up to N failed jobs.")] = None,
) -> None:
    """Make a policy, or change it. A paused policy stays paused."""
    from distop.services.policies import definition

    argument = parse_argument(arg)
    if argument is not None and not isinstance(argument, dict):
        raise InvalidArgument("--arg must be a JSON object")
    limits: dict[str, Any] = {
        "priority": priority,
        "max_jobs": max_jobs,
        "max_jobs_per_executor": max_jobs_per_executor,
        "max_failed": max_failed,
    }
    definition(name, start, argument, every, on or (), when, limits)  # refuse a wrong policy before etcd is asked
    made = current.with_client(
        lambda client: client.set_policy(name, table, start, argument, every=every, on=on or (), when=when, **limits)
    )
    current.answer(made.to_json(), f"policy {name} of table {table} is {made.stage}: {_triggers(made)} → {start}")


def ls(
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="Only the policies of this table.")] = None,
) -> None:
    """List policies, with their last evaluation."""
    found = current.with_client(lambda client: client.policies(table))
    if current.json:
        output.write_json([one.to_json() for one in found])
        return
    output.table(
        ("table", "policy", "state", "triggers", "condition", "starts", "last evaluation"),
        [
            (
                one.table,
                one.name,
                one.stage,
                _triggers(one),
                one.policy.when if one.policy is not None else one.problem,
                one.policy.start if one.policy is not None else "",
                _last(one),
            )
            for one in found
        ],
        "there is no policy: `distop policy set NAME TABLE --every 1d --start TYPE`, or `distop autopilot TABLE`",
    )


def show(name: NAME, table: TABLE) -> None:
    """Show a policy, and why its last evaluations did or did not start an operation."""
    import json

    one = current.with_client(lambda client: client.policy(table, name))
    if current.json:
        output.write_json(one.to_json())
        return
    data = one.to_json()
    output.fields(
        {
            "policy": name,
            "table": table,
            "state": one.stage,
            "problem": one.problem,
            "triggers": _triggers(one),
            "condition": data.get("when", ""),
            "starts": data.get("start", ""),
            "argument": json.dumps(data["arg"], ensure_ascii=False) if data.get("arg") else "",
            "priority": data.get("priority", ""),
            "max jobs": data.get("max_jobs", ""),
            "waiting events": one.events or "",
            "last operation": one.state.op,
            "set": f"{data.get('set_at', '')} by {data.get('by', '')}" if one.policy is not None else "",
        }
    )
    output.say("")
    output.table(
        ("time", "verdict", "triggers", "inputs", "why"),
        [
            (
                kept.time,
                kept.verdict,
                " ".join(kept.triggers),
                " ".join(f"{key}={value}" for key, value in kept.inputs.items()),
                kept.op or kept.why,
            )
            for kept in one.state.kept
        ],
        "not evaluated yet: an executor that serves the table evaluates it once a trigger is due",
    )


def pause(name: NAME, table: TABLE) -> None:
    """Pause a policy: nothing is started until it is resumed."""
    one = current.with_client(lambda client: client.pause_policy(table, name))
    current.answer(one.to_json(), f"policy {name} of table {table} is {one.stage}")


def resume(name: NAME, table: TABLE) -> None:
    """Resume a policy. What was due while it was paused counts once."""
    one = current.with_client(lambda client: client.resume_policy(table, name))
    current.answer(one.to_json(), f"policy {name} of table {table} is {one.stage}")


def rm(name: NAME, table: TABLE) -> None:
    """Remove a policy. Operations that it started continue."""
    current.with_client(lambda client: client.remove_policy(table, name))
    current.answer({"table": table, "name": name, "removed": True}, f"policy {name} of table {table} is removed")


def emit(
    table: TABLE,
    event: Annotated[str, typer.Argument(metavar="EVENT", help="The event's name, as in --on event:NAME.")],
    event_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Repeated calls with the same id are one event.")
    ] = None,
) -> None:
    """Emit an event on a table, which triggers its policies with --on event:EVENT."""
    names = current.with_client(lambda client: client.emit(table, event, event_id=event_id))
    sentence = (
        f"event {event} on table {table} triggers {', '.join(names)}"
        if names
        else (f"no policy of table {table} is triggered by event {event}")
    )
    current.answer({"table": table, "event": event, "policies": names}, sentence)


def autopilot(
    table: TABLE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the policies, and write nothing.")] = False,
) -> None:
    """Make the policies with which a table keeps itself, of the published types that fit its format."""
    found = current.with_client(lambda client: client.autopilot(table, dry_run=dry_run))
    if current.json:
        output.write_json(found.to_json())
        return
    for one in found.policies:
        when = f" when {one.policy.when}" if one.policy is not None and one.policy.when else ""
        starts = one.policy.start if one.policy is not None else ""
        output.say(f"{'made' if found.written else 'would make'} {one.name}: {_triggers(one)}{when} → {starts}")
    for name, why in found.left_out.items():
        output.say(f"left out {name}: {why}")


def _triggers(one: PolicyStatus) -> str:
    if one.policy is None:
        return ""
    every = (f"every {_interval(one.policy.every)}",) if one.policy.every else ()
    return ", ".join((*every, *(f"on {trigger}" for trigger in one.policy.on)))


def _interval(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds % size == 0:
            return f"{int(seconds // size)}{unit}"
    return f"{seconds:g}s"


def _last(one: PolicyStatus) -> str:
    if not one.state.kept:
        return ""
    last = one.state.kept[-1]
    return f"{last.time} {last.verdict}" + (f" {last.op}" if last.op else "")


GROUP: Mapping[str, Callable[..., None]] = {
    "set": set_policy,
    "ls": ls,
    "show": show,
    "pause": pause,
    "resume": resume,
    "rm": rm,
}
"""The commands of ``distop policy``."""
