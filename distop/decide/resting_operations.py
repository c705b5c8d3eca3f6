"""Pending operations in compact form.

Very many may wait for hours without a change. Each is one ``bytes`` value of about 150 bytes, instead of the dozen
objects of an active operation (750 bytes). Fields of its spec that others have as well are in a *template* that they
share.
"""

from __future__ import annotations

import marshal
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from distop.protocol.records import Spec, TableRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN = ("request_id", "time", "request_digest", "not_before", "id", "follows", "traceparent")
"""Fields of a spec, all texts, that differ for each operation; other fields are mostly shared."""

_FIELDS = tuple(field.name for field in fields(Spec))
_PLACES = tuple(_FIELDS.index(name) for name in OWN)


_DIGEST = re.compile(r"[0-9a-f]{64}")


def _packed(value: Any) -> Any:
    """A digest in half the bytes; other values are unchanged."""
    return bytes.fromhex(value) if isinstance(value, str) and _DIGEST.fullmatch(value) else value


def _digest(values: tuple[Any, ...]) -> int:
    """An equal number for equal values."""
    try:
        return hash(
            tuple(
                tuple(sorted(value.items())) if isinstance(value, Mapping) else value
                for value in values
                if not isinstance(value, TableRecord)
            )
        )
    except TypeError:  # a forged record with values that distop never writes
        return hash(repr(values))


class Templates:
    """Number → the shared fields of a spec in order; None for its own fields.

    A template is kept while it is used.
    """

    __slots__ = ("_last", "_next", "_numbers", "_uses", "_values")

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, ...]] = {}
        self._uses: dict[int, int] = {}
        self._numbers: dict[int, list[int]] = {}
        """Numbers by :func:`_digest`."""
        self._next = 0
        self._last = 0
        """The template used last: operations of one submitter come in a row."""

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        return self._values[number]

    def use(self, values: tuple[Any, ...]) -> int:
        """The number of this template; release it later."""
        if self._values.get(self._last) != values:
            alike = self._numbers.setdefault(_digest(values), [])
            self._last = next((number for number in alike if self._values[number] == values), 0)
            if not self._last:
                self._last = self._next = self._next + 1
                self._values[self._last], self._uses[self._last] = values, 0
                alike.append(self._last)
        self._uses[self._last] += 1
        return self._last

    def release(self, number: int) -> None:
        """Release one use of a template."""
        self._uses[number] -= 1
        if not self._uses[number]:
            digest = _digest(self._values.pop(number))
            self._numbers[digest].remove(number)
            if not self._numbers[digest]:
                del self._numbers[digest]
            del self._uses[number]


class Resting:
    """Instance number → object id, spec and other facts of a pending operation.

    The facts are values that ``marshal`` accepts (numbers, texts, bytes, None, and tuples of them). All are of one type
    on one table, whose instances are numbered across objects.
    """

    __slots__ = ("_former", "_objects", "_records", "_templates")

    def __init__(self, templates: Templates | None = None, former: Mapping[int, bytes] | None = None) -> None:
        self._records: dict[int, bytes] = {}
        self._former = former if former is not None else {}
        """The records of another one with the same templates: equal values are kept once."""
        self._objects: dict[int, str] = {}
        """Object ids of operations with an object."""
        self._templates = templates if templates is not None else Templates()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """The object id, or "", and the number of each."""
        objects = self._objects
        return ((objects.get(number, ""), number) for number in self._records)

    def beside(self) -> Resting:
        """An empty one that shares equal values with this one, until :meth:`alone`."""
        return Resting(self._templates, self._records)

    def alone(self) -> None:
        """Stop sharing values with another one."""
        self._former = {}

    def object_of(self, number: int) -> str | None:
        """The object id, or "", of the operation with this number; None: it is not here."""
        return self._objects.get(number, "") if number in self._records else None

    def has(self, obj: str, number: int) -> bool:
        """Whether the operation is here."""
        return number in self._records and self._objects.get(number, "") == obj

    def put(self, obj: str, number: int, spec: Spec, rest: tuple[Any, ...]) -> bool:
        """Keep it. False: another object's operation has the number, which distop never writes."""
        if number in self._records:
            return False
        values = [getattr(spec, name) for name in _FIELDS]
        own = [_packed(values[place]) for place in _PLACES]
        for place in _PLACES:
            values[place] = None
        record = marshal.dumps((self._templates.use(tuple(values)), *own, rest))
        former = self._former.get(number)
        self._records[number] = former if former == record else record
        if obj:
            self._objects[number] = obj
        return True

    def get(self, obj: str, number: int) -> tuple[Spec, tuple[Any, ...]] | None:
        """The spec and the facts of an operation; None: it is not here."""
        if not self.has(obj, number):
            return None
        template, *own, rest = marshal.loads(self._records[number])
        values = list(self._templates[template])
        for place, value in zip(_PLACES, own, strict=True):
            values[place] = value.hex() if isinstance(value, bytes) else value
        return Spec(*values), rest

    def rest_of(self, obj: str, number: int) -> tuple[Any, ...] | None:
        """The facts of an operation without its spec; None: it is not here."""
        return marshal.loads(self._records[number])[-1] if self.has(obj, number) else None

    def take(self, obj: str, number: int) -> tuple[Spec, tuple[Any, ...]] | None:
        """As :meth:`get`, and remove it."""
        found = self.get(obj, number)
        if found is not None:
            self._templates.release(marshal.loads(self._records.pop(number))[0])
            self._objects.pop(number, None)
        return found

    def differing(self, other: Resting) -> Iterator[tuple[str, int]]:
        """Object id and number of operations that the other one lacks or has changed; both share templates."""
        for obj, number in self:
            if other._records.get(number) != self._records[number] or other._objects.get(number, "") != obj:
                yield obj, number

    def clear(self) -> None:
        """Remove all."""
        for record in self._records.values():
            self._templates.release(marshal.loads(record)[0])
        self._records.clear()
        self._objects.clear()
