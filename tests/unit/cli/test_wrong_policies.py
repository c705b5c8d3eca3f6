"""Wrong input of each command of policies, and of the same call in Python: one sentence, the exit code, no write."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from distop.cli import command_context
from distop.errors import DistopError, InvalidArgument
from distop.protocol.behavior_declaration import Declaration
from tests.unit.cli.test_odd_command_lines import run
from tests.unit.support.model_submission import KEYS, TABLE, Etcd

if TYPE_CHECKING:
    from collections.abc import Callable

DRAWN = 200
LONG = "x" * 300


class Wrong(NamedTuple):
    """A value of an option, and the exit code. ``text``: how the command line spells it, if not as the value."""

    value: Any
    code: int = 2
    text: str | None = None

    @property
    def spelled(self) -> str:
        return self.text if self.text is not None else str(self.value)


def each(*values: Any) -> list[Wrong]:
    return [Wrong(value) for value in values]


NAMES = each("", LONG)
UNKNOWN_NAMES = [*NAMES, Wrong("nightl", 4), Wrong("a/b", 4), Wrong("é", 4)]
TABLES = [Wrong("u", 4), Wrong("T", 4), Wrong("t.", 4), Wrong(LONG), Wrong("")]
SET: dict[str, list[Wrong]] = {
    "name": NAMES,
    "table": TABLES,
    "start": each("compactify", "1st", "", "no op", LONG, "noop/1"),
    "arg": [
        *(Wrong(InvalidArgument, 2, text) for text in ("{", "", "nan", "@/no/such/file", "{} {}")),
        *(Wrong(value, 2, json.dumps(value)) for value in ([], "x", 5, {"no_such": 1}, {"jobs": -1}, {"jobs": "many"})),
    ],
    "every": each("soon", "0", "-1h", "nan", "0.5s", "1e999", "", "1 fortnight", "inf"),
    "on": [Wrong([one]) for one in ("versions", "event:", "event", "", "Version", "event")]
    + [Wrong([f"event:{n}" for n in range(21)])],
    "when": each(
        *("files >", "file > 5", "files > 5GiB", "bytes > 3d", "oldest_snapshot > 5", "1 > 2", "((((", "files"),
        *("files > 5 files", "hours_since. > 3", "files ≥ 5", "files > 5 and", "not", "files == 5 or or", "5"),
        *("files > bytes", "files > " + "1" * 2_000, "(" * 50 + "files > 1" + ")" * 50, "files > 5; files > 6"),
    ),
    "priority": each(101, -101, "x", 1.5, 10**30),
    "max_jobs": each(-1, "x", 1.5),
    "max_jobs_per_executor": each(-3, "y"),
    "max_failed": each("101%", "-1", "x", "5%%"),
}
RIGHT: dict[str, list[Any]] = {
    "name": ["nightly", "new"],
    "table": [TABLE],
    "start": ["noop"],
    "arg": [None, {"jobs": 2}],
    "every": ["1h", "7d", "90"],
    "on": [[], ["version"], ["event:loaded", "version"]],
    "when": [None, "files > 5", "not (bytes < 1GiB or hours_since.noop < 6)"],
    "priority": [None, 3],
    "max_jobs": [None, 2],
    "max_jobs_per_executor": [None, 1],
    "max_failed": [None, "5%", 3],
}
OTHERS: dict[str, tuple[str, dict[str, list[Wrong]]]] = {
    "policies": ("policy ls", {"table": TABLES}),
    "policy": ("policy show", {"table": TABLES, "name": UNKNOWN_NAMES}),
    "pause_policy": ("policy pause", {"table": TABLES, "name": UNKNOWN_NAMES}),
    "resume_policy": ("policy resume", {"table": TABLES, "name": UNKNOWN_NAMES}),
    "remove_policy": ("policy rm", {"table": TABLES, "name": UNKNOWN_NAMES}),
    "emit": ("emit", {"table": TABLES, "name": each("", LONG * 4), "event_id": each("", LONG * 4)}),
    "autopilot": ("autopilot", {"table": TABLES}),
}


class Call(NamedTuple):
    """One wrong call. ``python``: the same in Python; None: only the command line can be wrong like that."""

    argv: list[str]
    code: int
    python: Callable[[Any], Any] | None


def drawn(seed: int) -> Call:
    chance = random.Random(seed)
    method = chance.choice(["set_policy"] * 6 + list(OTHERS))
    if method != "set_policy":
        words, fields = OTHERS[method]
        given: dict[str, Any] = {"table": TABLE, "name": "nightly"}
        wrong_name = chance.choice(list(fields))
        wrong = chance.choice(fields[wrong_name])
        text = {**given, wrong_name: wrong.spelled}
        given[wrong_name] = wrong.value
        positional = {"policies": ["table"], "autopilot": ["table"], "emit": ["table", "name"]}.get(
            method, ["name", "table"]
        )
        argv = [*words.split(), *(["--event-id=" + text["event_id"]] if "event_id" in text else []), "--"]
        argv += [text[one] for one in positional]
        named = {one: given[one] for one in positional} | {one: given[one] for one in given if one == "event_id"}
        return Call(argv, wrong.code, lambda client: getattr(client, method)(**named))
    values = {one: chance.choice(known) for one, known in RIGHT.items()}
    texts = {one: json.dumps(value) if one == "arg" and value is not None else value for one, value in values.items()}
    wrong_name = chance.choice(list(SET))
    wrong = chance.choice(SET[wrong_name])
    values[wrong_name] = wrong.value
    texts[wrong_name] = wrong.value if wrong_name == "on" else wrong.spelled
    argv = ["policy", "set"]
    for one in SET:
        if one in ("name", "table") or texts[one] is None:
            continue
        for text in texts[one] if one == "on" else [texts[one]]:
            argv.append(f"--{one.replace('_', '-')}={text}")
    argv += ["--", str(texts["name"]), str(texts["table"])]
    if values["arg"] is InvalidArgument:
        return Call(argv, wrong.code, None)
    return Call(argv, wrong.code, lambda client: client.set_policy(**values))


async def beforehand() -> Etcd:
    """A store with a policy."""
    etcd = Etcd()
    schema = {"properties": {"jobs": {"type": "integer", "minimum": 0}}, "additionalProperties": False}
    etcd.put(KEYS.behavior("noop"), Declaration("noop", schema).encode())
    etcd.renew_client()
    await etcd.client.set_policy("nightly", TABLE, "noop", every="1d", on="event:loaded")
    return etcd


@pytest.mark.parametrize("seed", range(DRAWN))
def test_wrong_input_is_refused_in_one_sentence_and_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = drawn(seed)
    etcd = asyncio.run(beforehand())
    before = etcd.store.listing()

    def with_client(_: Any, work: Any, **__: Any) -> Any:
        return asyncio.run(work(etcd.client))

    # The only function that connects to etcd; here it uses a client of the model.
    monkeypatch.setattr(command_context.GlobalOptions, "with_client", with_client)
    code, out, errors = run(call.argv)
    assert (code, out) == (call.code, ""), (call.argv, errors)
    assert errors.startswith("error: "), (call.argv, errors)
    assert errors.count("\n") == 1, (call.argv, errors)
    assert etcd.store.listing() == before
    if call.python is not None:
        with pytest.raises(DistopError) as raised:
            asyncio.run(call.python(etcd.client))
        assert raised.value.exit_code == call.code, (call.argv, raised.value)
        assert "\n" not in str(raised.value)
        assert etcd.store.listing() == before


def test_the_right_values_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a drawn call could be refused for another value than its wrong one."""
    etcd = asyncio.run(beforehand())
    for seed in range(30):
        chance = random.Random(seed)
        values = {one: chance.choice(known) for one, known in RIGHT.items()}
        assert asyncio.run(etcd.client.set_policy(**values)).stage == "active"
    assert asyncio.run(etcd.client.emit(TABLE, "loaded", event_id="one")) is not None
    assert KEYS.policy(TABLE, "new") in {kv.key for kv in etcd.store.listing()}
