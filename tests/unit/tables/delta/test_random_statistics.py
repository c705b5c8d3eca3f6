"""Random tables of delta-rs: what the log and the footers decide is compared with the values themselves."""

from __future__ import annotations

import math
import random
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from distop.protocol.records import TableRecord
from distop.tables import plan_table, reader_of
from distop.tables.reading.file_facts import FileFacts
from distop_behaviors.validate.statistics import decide
from distop_behaviors.validate.validate_argument import Argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TABLES = 25
"""Tables of each seed."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FLOATS = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, 0.1, 16777217.0)
TEXTS = (
    *("", "a", "Z", "ä", "a" * 63, "a" * 65, "a" * 64 + "b", "é" * 40, "😀" * 20, "\uffff" * 40, "a" * 63 + "😀"),
    *("\U0010ffff" * 20, "z" * 31 + "\ud7ff" * 40),
)
DAYS = (date(1, 1, 1), date(1582, 10, 15), date(1970, 1, 1), date(9999, 12, 31))
MICROS = (0, 1, -1, 999, 1000, -1001, 1_719_999_999_999_999, -2_208_988_800_000_001, -(10**15) - 1)
DECIMALS = ((9, 2), (15, 3), (16, 3), (18, 0), (20, 0), (28, 10))


def _narrow(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _decimal(draw: random.Random, precision: int, scale: int) -> Decimal:
    most = 10**precision - 1
    return Decimal(draw.choice([draw.randint(-most, most), draw.randint(-100, 100), most])).scaleb(-scale)


KINDS: dict[pa.DataType, Callable[[random.Random], Any]] = {
    pa.int8(): lambda draw: draw.randint(-128, 127),
    pa.int64(): lambda draw: draw.choice([0, 2**53 + 1, -(2**63), 2**63 - 1, draw.randint(-(2**63), 2**63 - 1)]),
    pa.float64(): lambda draw: draw.choice([*FLOATS, draw.uniform(-5, 5)]),
    pa.float32(): lambda draw: _narrow(draw.choice([*FLOATS, draw.uniform(-5, 5)])),
    pa.string(): lambda draw: draw.choice(TEXTS),
    pa.date32(): lambda draw: draw.choice(DAYS),
    pa.timestamp("us", "UTC"): lambda draw: EPOCH + timedelta(microseconds=draw.choice(MICROS)),
    pa.timestamp("us"): lambda draw: (EPOCH + timedelta(microseconds=draw.choice(MICROS))).replace(tzinfo=None),
    **{pa.decimal128(p, s): lambda draw, p=p, s=s: _decimal(draw, p, s) for p, s in DECIMALS},
}


def _bound(value: Any) -> Any:
    """A value as a bound in an argument."""
    if isinstance(value, datetime):
        return f"{value.replace(tzinfo=None).isoformat(' ', 'microseconds')}"
    return str(value) if isinstance(value, date | Decimal) else value


def _order(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _outside(value: Any, low: Any, high: Any) -> bool:
    if value is None:
        return False
    if isinstance(value, float) and math.isnan(value):  # greater than all numbers
        return high is not None
    below = low is not None and _order(value) < _order(low)
    return below or (high is not None and _order(value) > _order(high))


def _ranges(draw: random.Random, values: list[Any], another: Any) -> Iterator[tuple[Any, Any]]:
    usable = [v for v in (*values, another) if v is not None and not (isinstance(v, float) and not math.isfinite(v))]
    for _ in range(4 if usable else 0):
        low, high = draw.choice([None, *usable]), draw.choice([None, *usable])
        if (low is None) != (high is None) or (low is not None and _order(low) <= _order(high)):
            yield low, high


@pytest.mark.parametrize("seed", range(2))
def test_no_decision_contradicts_the_values(seed: int, tmp_path: Path) -> None:
    draw, decided = random.Random(seed), 0
    for n in range(TABLES):
        rows, kinds = draw.choice((1, 2, 5)), draw.sample(list(KINDS), 6)
        values = {
            f"c{at}": [None if draw.random() < 0.15 else KINDS[kind](draw) for _ in range(rows)]
            for at, kind in enumerate(kinds)
        }
        folder = tmp_path / str(n)
        columns = {name: pa.array(values[name], kind) for name, kind in zip(values, kinds, strict=True)}
        write_deltalake(folder, pa.table(columns))
        if draw.random() < 0.3:
            DeltaTable(folder).create_checkpoint()
        record = TableRecord("t", "delta", str(folder))
        [partition] = plan_table(record).partitions
        reader = reader_of(record, [partition])
        [facts] = reader.facts(partition.files, frozenset(values), lambda: None)
        assert isinstance(facts, FileFacts)
        precise = reader.precise_facts([facts], frozenset(values), lambda: None)
        for name, kind in zip(values, kinds, strict=True):
            for low, high in _ranges(draw, values[name], KINDS[kind](draw)):
                given = {"column": name, "min": _bound(low), "max": _bound(high)}
                check = {"range": {key: value for key, value in given.items() if value is not None}}
                parsed = Argument.model_validate({"checks": [check]}).checks[0]
                true = sum(_outside(value, low, high) for value in values[name])
                for found in (facts, precise.get(facts.path, facts)):
                    decision = decide(parsed, found)
                    decided += decision.verdict != "unknown"
                    context = (kind, check, values[name], decision)
                    assert decision.verdict != "pass" or true == 0, context
                    assert decision.violations <= true, context
                    assert decision.verdict != "violated" or not decision.exact or decision.violations == true, context
    assert decided > TABLES
