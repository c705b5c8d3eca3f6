"""An error about an unknown name proposes the known name that is nearest to it, wherever there is a list of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import load
from distop.client.graph_file import read_graph
from distop.errors import InvalidArgument, NotFound, UnknownBehavior
from distop.protocol.json_codec import dumps
from distop.protocol.records import TableRecord
from distop.protocol.texts import did_you_mean
from distop.schemas.argument_schema import check_argument
from distop.services.inspection.survey import open_states
from distop.settings import Settings
from distop.settings_file import SettingsFile
from distop.tables.formats import format_of
from distop.tables.table_options import check_options
from distop_behaviors.noop import Noop
from distop_behaviors.validate.validate_argument import Argument
from tests.support.command import Ran, distop_command
from tests.unit.support.model_submission import KEYS, Etcd, run

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["distop_command"]


@pytest.mark.parametrize(
    ("name", "known", "listed_as", "text"),
    [
        ("valdiate", ("apply", "validate"), "", " (did you mean 'validate'?)"),
        ("Validate", ("apply", "validate"), "known", " (did you mean 'validate'? known: apply, validate)"),
        ("merge", ("apply", "validate"), "", ""),
        ("merge", ("apply", "validate"), "known", " (known: apply, validate)"),
        ("merge", (), "known", " (known: none)"),
        (7, ("7",), "", ""),
        ("a" * 1_000_000, ("a" * 999_999,), "", ""),
        ("x", [f"{n}_" for n in range(60)], "known", f" (known: {', '.join(f'{n}_' for n in range(50))} and 10 more)"),
    ],
)
def test_the_nearest_name_is_suggested_and_the_list_is_bounded(
    name: object, known: Any, listed_as: str, text: str
) -> None:
    assert did_you_mean(name, known, listed_as) == text


def settings() -> None:
    Settings(file=SettingsFile(values={"histroy-limit": "9"}))


def argument() -> None:
    check_argument("noop", Noop.declaration().arg_schema, dumps({"sleeep": 1}))


OP = {"type": "noop", "table": "t"}
MEANT: dict[str, tuple[Callable[[], object], str]] = {
    "operation type": (lambda: load("valdiate"), "validate"),
    "table format": (lambda: format_of(TableRecord("t", "icebreg", "/t")), "iceberg"),
    "table option": (lambda: check_options({"gruop_files": 1}), "group_files"),
    "setting": (settings, "history_limit"),
    "field of a graph": (lambda: read_graph({"type": "noop", "tabel": "t"}), "table"),
    "field of every": (lambda: read_graph({**OP, "every": {"second": 9}}), "seconds"),
    "name in a graph": (
        lambda: read_graph([{**OP, "name": "first"}, {**OP, "after": ["frist"]}]),
        "first",
    ),
    "state": (lambda: open_states("runing"), "running"),
    "argument": (argument, "sleep"),
    "check": (lambda: Argument.model_validate({"checks": [{"notnull": "a"}]}), "not_null"),
}


@pytest.mark.parametrize("what", MEANT)
def test_an_error_about_an_unknown_name_suggests_the_nearest_one(what: str) -> None:
    call, meant = MEANT[what]
    with pytest.raises((InvalidArgument, UnknownBehavior, ValueError), match=f"did you mean '{meant}'"):
        call()


def test_an_error_about_an_unknown_type_or_table_suggests_the_nearest_one() -> None:
    async def work(etcd: Etcd) -> None:
        etcd.put(KEYS.table("t.orders"), TableRecord("t.orders", "parquet", "/data").encode())
        for type_name, table, error, meant in (
            ("nop", "t.orders", UnknownBehavior, "no behavior 'nop' (did you mean 'noop'? published: noop): start an"),
            ("noop", "t.order", NotFound, "no table 't.order' (did you mean 't.orders'?): register it with"),
        ):
            with pytest.raises(error) as raised:
                await etcd.client.start_operation(type_name, table, {})
            assert meant in str(raised.value)
        with pytest.raises(NotFound, match=r"there is no table 't.order' \(did you mean 't.orders'\?\)$"):
            await etcd.client.remove_table("t.order")
        etcd.suggests_tables = False
        with pytest.raises(NotFound, match=r"there is no table 't.order'$"):
            await etcd.client.remove_table("t.order")

    run(work)


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (("ls", "--tabel", "t"), "did you mean '--table'?"),
        (("ls", "--jsno"), "did you mean '--json'?"),
        (("strat", "noop", "t"), "Did you mean 'start'?"),
    ],
)
def test_an_error_about_an_unknown_option_or_command_suggests_the_nearest_one(
    distop_command: Callable[..., Ran], argv: tuple[str, ...], meant: str
) -> None:
    ran = distop_command(*argv)
    assert (ran.code, meant in ran.sentence) == (2, True), ran.sentence
