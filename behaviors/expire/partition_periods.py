"""When the rows of a partition end, by the partition's value. Pure.

A value that does not certainly name a time has no end, so its partition stays.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any

from distop.tables.partition_removal import DAY, HOUR, MONTH, VALUE, YEAR

if TYPE_CHECKING:
    from datetime import tzinfo

    from distop.tables.partition_removal import ValuedPartition

_ISO = (
    (re.compile(r"[0-9]{4}"), "%Y"),
    (re.compile(r"[0-9]{4}-[0-9]{2}"), "%Y-%m"),
    (re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"), "%Y-%m-%d"),
)
_ISO_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:.*")
_DAYS, _MONTHS = ("%d", "%j", "%x"), ("%m", "%b", "%B")
_TIMES = (
    (timedelta(), ("%f",)),
    (timedelta(seconds=1), ("%S", "%X", "%T", "%c", "%s")),
    (timedelta(minutes=1), ("%M",)),
    (timedelta(hours=1), ("%H", "%I")),
)
"""The periods of texts with a time, by their finest part."""
_EPOCH_YEAR = 1970


def end_of(partition: ValuedPartition, pattern: str | None, zone: tzinfo) -> datetime | None:
    """When the period of a partition ends, exclusive; None if its value names no time.

    ``pattern``: of texts and numbers (as ``strptime``); None: ISO dates and times, months and years. ``zone``: of
    values without one.
    """
    try:
        zone = UTC if partition.utc else zone
        if partition.unit != VALUE:
            return _end_of_unit(int(partition.value), partition.unit, zone)
        return _end_of_value(partition.value, pattern, zone)
    except (ValueError, TypeError, OverflowError):
        return None


def _end_of_value(value: Any, pattern: str | None, zone: tzinfo) -> datetime | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else _latest(value, zone)
    if isinstance(value, date):
        return _midnight(value + timedelta(days=1), zone)
    text = str(value)
    if pattern is None:
        pattern = next((found for form, found in _ISO if form.fullmatch(text)), None)
        if pattern is None:
            return _end_of_value(datetime.fromisoformat(text), None, zone) if _ISO_TIME.fullmatch(text) else None
    start = datetime.strptime(text, pattern)  # noqa: DTZ007 -- the zone is added below
    zone = start.tzinfo or zone
    pattern = pattern.replace("%%", "")
    period = next((length for length, parts in _TIMES if any(part in pattern for part in parts)), None)
    if period is not None:
        return _end_of_value(start + period, None, zone)
    if any(part in pattern for part in _DAYS):
        return _midnight(start.date() + timedelta(days=1), zone)
    if any(part in pattern for part in _MONTHS):
        return _end_of_month(start.year, start.month, zone)
    return _midnight(date(start.year + 1, 1, 1), zone)


def _latest(value: datetime, zone: tzinfo) -> datetime:
    """A time without a zone in a zone: the later one, where clocks are set back and have the time twice."""
    return max((value.replace(tzinfo=zone, fold=fold) for fold in (0, 1)), key=datetime.timestamp)


def _end_of_unit(number: int, unit: str, zone: tzinfo) -> datetime:
    if unit == HOUR:
        return (datetime(1970, 1, 1) + timedelta(hours=number + 1)).replace(tzinfo=zone)  # noqa: DTZ001
    if unit == DAY:
        return _midnight(date(1970, 1, 1) + timedelta(days=number + 1), zone)
    if unit == MONTH:
        return _end_of_month(_EPOCH_YEAR + number // 12, number % 12 + 1, zone)
    assert unit == YEAR
    return _midnight(date(_EPOCH_YEAR + number + 1, 1, 1), zone)


def _end_of_month(year: int, month: int, zone: tzinfo) -> datetime:
    return _midnight(date(year + month // 12, month % 12 + 1, 1), zone)


def _midnight(day: date, zone: tzinfo) -> datetime:
    return datetime.combine(day, time(), zone)
