#!/usr/bin/env python3
"""Checks that the messages and calls of the service do not break clients of the last release.

    scripts/check_proto.py              compare proto/distop/v1 with its copy in proto/released
    scripts/check_proto.py --release    replace the copy by the present files (docs/how-to/release.md)

docs/reference/compatibility.md has the rules. What is added is compatible; what is removed or changed is not.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from google.api import annotations_pb2
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
API = "distop/v1"
CURRENT, RELEASED = ROOT / "proto", ROOT / "proto" / "released"
_Field = descriptor_pb2.FieldDescriptorProto


def described(folder: Path) -> list[descriptor_pb2.FileDescriptorProto]:
    """The descriptors of the files in ``folder``/distop/v1. Raises ValueError if they do not compile."""
    from grpc_tools import protoc

    google = find_spec("google.api.annotations_pb2")
    assert google is not None
    assert google.origin is not None
    include = [f"-I{folder}", f"-I{Path(google.origin).parents[2]}", f"-I{files('grpc_tools') / '_proto'}"]
    names = [f"{API}/{one.name}" for one in sorted((folder / API).glob("*.proto"))]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "set"
        if not names or protoc.main(["protoc", *include, f"--descriptor_set_out={out}", *names]) != 0:
            raise ValueError(f"the files in {folder / API} do not compile")
        return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def breaks(
    released: Iterable[descriptor_pb2.FileDescriptorProto], current: Iterable[descriptor_pb2.FileDescriptorProto]
) -> list[str]:
    """What breaks a client of the release, one sentence each."""
    before, after = list(released), list(current)
    return [
        *_changed("message", dict(_messages(before)), dict(_messages(after)), _of_message),
        *_changed("enum", dict(_enums(before)), dict(_enums(after)), _of_enum),
        *_changed("service", dict(_services(before)), dict(_services(after)), _of_service),
    ]


def _changed(kind: str, before: dict[str, Any], after: dict[str, Any], compare: Any) -> Iterator[str]:
    for name, old in before.items():
        if name in after:
            yield from compare(name, old, after[name])
        else:
            yield f"the {kind} {name} was removed"


def _messages(listed: Iterable[descriptor_pb2.FileDescriptorProto]) -> Iterator[tuple[str, Any]]:
    def nested(prefix: str, messages: Iterable[Any]) -> Iterator[tuple[str, Any]]:
        for one in messages:
            yield f"{prefix}.{one.name}", one
            yield from nested(f"{prefix}.{one.name}", one.nested_type)

    for file in listed:
        yield from nested(file.package, file.message_type)


def _enums(listed: Iterable[descriptor_pb2.FileDescriptorProto]) -> Iterator[tuple[str, Any]]:
    files_ = list(listed)
    for file in files_:
        yield from ((f"{file.package}.{one.name}", one) for one in file.enum_type)
    for name, message in _messages(files_):
        yield from ((f"{name}.{one.name}", one) for one in message.enum_type)


def _services(listed: Iterable[descriptor_pb2.FileDescriptorProto]) -> Iterator[tuple[str, Any]]:
    for file in listed:
        yield from ((f"{file.package}.{one.name}", one) for one in file.service)


def _of_message(name: str, old: Any, new: Any) -> Iterator[str]:
    fields = {one.number: one for one in new.field}
    for one in old.field:
        place = f"the field {one.name} ({one.number}) of {name}"
        if one.number not in fields:
            yield f"{place} was removed"
            continue
        now = fields[one.number]
        if now.name != one.name:
            yield f"{place} is now called {now.name}"
        if _type(now) != _type(one):
            yield f"{place} was {_type(one)}, and is now {_type(now)}"
        if _oneof(new, now) != _oneof(old, one):
            yield f"{place} was in the oneof {_oneof(old, one) or 'none'}, and is now in {_oneof(new, now) or 'none'}"
    for number, text in _reserved(old):
        if (number, text) not in set(_reserved(new)):
            yield f"{name} no longer reserves {text or number}"


def _type(field: Any) -> str:
    """Type and presence of a field, in words."""
    presence = "repeated " if field.label == _Field.LABEL_REPEATED else "optional " if field.proto3_optional else ""
    return presence + (field.type_name.removeprefix(".") or _Field.Type.Name(field.type).removeprefix("TYPE_").lower())


def _oneof(message: Any, field: Any) -> str:
    if field.proto3_optional or not field.HasField("oneof_index"):
        return ""
    return str(message.oneof_decl[field.oneof_index].name)


def _reserved(message: Any) -> Iterator[tuple[int, str]]:
    for one in message.reserved_range:
        yield from ((number, "") for number in range(one.start, min(one.end, one.start + 1_000)))
    yield from ((0, one) for one in message.reserved_name)


def _of_enum(name: str, old: Any, new: Any) -> Iterator[str]:
    values = {one.number: one.name for one in new.value}
    for one in old.value:
        if values.get(one.number) != one.name:
            yield f"the value {one.name} ({one.number}) of {name} was removed or renamed"


def _of_service(name: str, old: Any, new: Any) -> Iterator[str]:
    methods = {one.name: one for one in new.method}
    for one in old.method:
        place = f"the call {name}/{one.name}"
        if one.name not in methods:
            yield f"{place} was removed"
            continue
        now = methods[one.name]
        for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
            if getattr(one, what) != getattr(now, what):
                yield f"{place} has another {what.replace('_', ' ')}: {getattr(one, what)} became {getattr(now, what)}"
        routes = _routes(now)
        yield from (f"{place} has lost the route {' '.join(route)}" for route in _routes(one) if route not in routes)


def _routes(method: Any) -> list[tuple[str, str, str]]:
    """Verb, path and body of each HTTP route."""
    rule = method.options.Extensions[annotations_pb2.http]
    return [
        (verb.upper(), getattr(one, verb), f"body {one.body}" if one.body else "without a body")
        for one in (rule, *rule.additional_bindings)
        if (verb := one.WhichOneof("pattern"))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that the service's messages do not break released clients.")
    parser.add_argument("--release", action="store_true", help="replace the released copy by the present files")
    if parser.parse_args().release:
        shutil.rmtree(RELEASED / API, ignore_errors=True)
        shutil.copytree(CURRENT / API, RELEASED / API)
        return 0
    found = breaks(described(RELEASED), described(CURRENT))
    for one in found:
        print(f"proto: {one} since the last release: see docs/reference/compatibility.md", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
