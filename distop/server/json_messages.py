"""Messages of the service as JSON, and back.

Fields have their names of the ``.proto`` files. A ``Json`` message is the value itself, and a time is RFC 3339. Whole
numbers are JSON numbers.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from distop.client.service_messages import json_message, json_value
from distop.errors import InvalidArgument
from distop.protocol.texts import did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from google.protobuf.message import Message

_WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
JSON = "distop.v1.Json"
TIME = "google.protobuf.Timestamp"
DURATION = "google.protobuf.Duration"
ANY = "google.protobuf.Any"


def is_map(field: Any) -> bool:
    """Whether a field is a map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def to_json(message: Message) -> dict[str, Any]:
    """The fields of a message. Absent optional fields are left out; others have their defaults."""
    data: dict[str, Any] = {}
    field: Any
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value: Any = getattr(message, field.name)
        if is_map(field):
            data[field.name] = {key: _to_json(field.message_type.fields_by_name["value"], value[key]) for key in value}
        elif field.is_repeated:
            data[field.name] = [_to_json(field, one) for one in value]
        else:
            data[field.name] = _to_json(field, value)
    return data


def _to_json(field: Any, value: Any) -> Any:
    if field.message_type is None:
        return value
    if field.message_type.full_name == JSON:
        return json_value(value)
    name = field.message_type.full_name
    if name in (TIME, DURATION):
        return value.ToJsonString()
    if name == ANY:
        packed = _packed(value)
        return {"@type": value.type_url, **to_json(packed)}
    return to_json(value)


def _packed(value: Any) -> Message:
    """The message in a ``google.protobuf.Any``."""
    kind = descriptor_pool.Default().FindMessageTypeByName(value.TypeName())
    return message_factory.GetMessageClass(kind).FromString(value.value)


def fill(message: Message, data: object, place: str = "the request") -> None:
    """Set the fields of a message from JSON. Raises InvalidArgument, which names the place."""
    if not isinstance(data, dict):
        raise InvalidArgument(f"{place} must be an object, not {shown(data)}")
    known: Mapping[str, Any] = message.DESCRIPTOR.fields_by_name
    for name, value in data.items():
        if not name.isascii() or name not in known:  # protobuf fails on lone surrogates
            raise InvalidArgument(f"{place} has no field {shown(name)}{did_you_mean(name, known, 'its fields')}")
        if value is not None or _is_json(known[name]):
            _set(message, known[name], value, f"{name} in {place}" if place != "the request" else name)


def _is_json(field: Any) -> bool:
    return field.message_type is not None and field.message_type.full_name == JSON


def _set(message: Message, field: Any, value: Any, place: str) -> None:
    target: Any = getattr(message, field.name)
    if is_map(field):
        if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
            raise InvalidArgument(f"{place} must be an object of texts, not {shown(value)}")
        for key, one in value.items():
            target[_text(key, place)] = _text(one, place)
    elif field.is_repeated:
        if not isinstance(value, list):
            raise InvalidArgument(f"{place} must be a list, not {shown(value)}")
        for n, one in enumerate(value):
            if field.message_type is None:
                target.append(_scalar(field, one, f"{place}[{n}]"))
            else:
                _fill(target.add(), one, f"{place}[{n}]")
    elif field.message_type is not None:
        target.SetInParent()
        _fill(target, value, place)
    else:
        setattr(message, field.name, _scalar(field, value, place))


def _fill(message: Any, value: Any, place: str) -> None:
    if message.DESCRIPTOR.full_name == JSON:
        message.CopyFrom(json_message(value))
    elif isinstance(message, Timestamp | Duration):
        what = "a time in RFC 3339" if isinstance(message, Timestamp) else 'a duration such as "1.5s"'
        try:
            message.FromJsonString(value)
        except (ValueError, AttributeError, TypeError):
            raise InvalidArgument(f"{place} must be {what}, not {shown(value)}") from None
    else:
        fill(message, value, place)


def _scalar(field: Any, value: Any, place: str) -> Any:
    """The value, if it has the type of the field."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        if isinstance(value, bool):
            return value
        raise InvalidArgument(f"{place} must be true or false, not {shown(value)}")
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if isinstance(value, str):
            return _text(value, place)
        raise InvalidArgument(f"{place} must be a text, not {shown(value)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"{place} must be a number, not {shown(value)}")
    if kind not in _WHOLE:
        try:
            return float(value)
        except OverflowError:
            raise InvalidArgument(f"{place} must be a number, not {shown(value)}") from None
    least, most = _WHOLE[kind]
    if not isfinite(value) or int(value) != value or not least <= value <= most:
        raise InvalidArgument(f"{place} must be a whole number from {least} to {most}, not {shown(value)}")
    return int(value)


def _text(value: str, place: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{place} must be a text in UTF-8, not {shown(value)}") from None
    return value


def fill_from_query(message: Message, given: Sequence[tuple[str, str]]) -> None:
    """Set fields of a message from query parameters. Raises InvalidArgument.

    A repeated field may be given several times, and an entry of a map as ``labels.team=lake``.
    """
    known: Mapping[str, Any] = message.DESCRIPTOR.fields_by_name
    for name, text in given:
        base, dot, key = name.partition(".")
        field = known.get(base)
        if field is None or bool(dot) != is_map(field) or (field.message_type is not None and not is_map(field)):
            raise InvalidArgument(f"there is no parameter {shown(name)}{did_you_mean(name, known, 'the parameters')}")
        if dot:
            getattr(message, base)[key] = text
        elif field.is_repeated:
            getattr(message, base).append(_parsed(field, text, name))
        else:
            setattr(message, base, _parsed(field, text, name))


def _parsed(field: Any, text: str, name: str) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _scalar(field, text, name)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return _scalar(field, {"true": True, "false": False}.get(text, text), name)
    try:
        number: Any = int(text) if field.cpp_type in _WHOLE and len(text) < 25 else float(text)
    except ValueError:
        number = text
    return _scalar(field, number, name)
