"""The check that the service's messages do not break clients of the last release."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import check_proto
import pytest

if TYPE_CHECKING:
    from pathlib import Path

FILE = """
syntax = "proto3";
package distop.v1;
import "google/api/annotations.proto";
service Things {
  rpc Get(GetRequest) returns (Thing) {
    option (google.api.http) = {get: "/v1/things/{name}" additional_bindings {get: "/v1/thing/{name}"}};
  }
  rpc Watch(GetRequest) returns (stream Thing);
  rpc Add(Thing) returns (Thing) { option (google.api.http) = {post: "/v1/things" body: "*"}; }
}
message GetRequest { string name = 1; }
message Thing {
  reserved 9;
  reserved "former";
  enum Kind { NONE = 0; ROUND = 1; }
  message Part { int32 size = 1; }
  string name = 1;
  optional int64 count = 2;
  repeated string labels = 3;
  map<string, string> more = 4;
  Kind kind = 5;
  oneof shape { string round = 6; string flat = 7; }
  repeated Part parts = 8;
}
"""


def described(folder: Path, text: str) -> list[check_proto.descriptor_pb2.FileDescriptorProto]:
    target = folder / check_proto.API
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "things.proto").write_text(text)
    return check_proto.described(folder)


def found(folder: Path, *changes: tuple[str, str]) -> list[str]:
    text = FILE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return check_proto.breaks(described(folder, FILE), described(folder, text))


def test_the_present_messages_break_nothing() -> None:
    assert (
        check_proto.breaks(check_proto.described(check_proto.RELEASED), check_proto.described(check_proto.CURRENT))
        == []
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  string name = 1;\n  optional", "  optional", "the field name (1) of distop.v1.Thing was removed"),
        ("optional int64 count = 2", "optional int64 count = 20", "the field count (2) of distop.v1.Thing was removed"),
        ("int64 count = 2", "int64 number = 2", "the field count (2) of distop.v1.Thing is now called number"),
        ("int64 count = 2", "int32 count = 2", "was optional int64, and is now optional int32"),
        ("optional int64 count", "int64 count", "was optional int64, and is now int64"),
        ("repeated string labels", "string labels", "was repeated string, and is now string"),
        (
            "map<string, string> more",
            "map<string, int32> more",
            "the field value (2) of distop.v1.Thing.MoreEntry was string",
        ),
        ("Kind kind = 5", "int32 kind = 5", "was distop.v1.Thing.Kind, and is now int32"),
        ("string flat = 7; }", "} string flat = 7;", "was in the oneof shape, and is now in none"),
        ("ROUND = 1", "CIRCLE = 1", "the value ROUND (1) of distop.v1.Thing.Kind was removed or renamed"),
        ("int32 size = 1;", "", "the field size (1) of distop.v1.Thing.Part was removed"),
        ("reserved 9;", "", "distop.v1.Thing no longer reserves 9"),
        ('reserved "former";', "", "distop.v1.Thing no longer reserves former"),
        ("rpc Watch(GetRequest) returns (stream Thing);", "", "the call distop.v1.Things/Watch was removed"),
        ("(stream Thing)", "(Thing)", "the call distop.v1.Things/Watch has another server streaming"),
        ("rpc Add(Thing)", "rpc Add(GetRequest)", "the call distop.v1.Things/Add has another input type"),
        ("rpc Add(Thing) returns (Thing)", "rpc Add(Thing) returns (GetRequest)", "has another output type"),
        ('"/v1/things/{name}"', '"/v1/a/{name}"', "Things/Get has lost the route GET /v1/things/{name} without a body"),
        (' additional_bindings {get: "/v1/thing/{name}"}', "", "has lost the route GET /v1/thing/{name}"),
        (' body: "*"', "", "has lost the route POST /v1/things body *"),
        ("package distop.v1;", "package distop.v2;", "the service distop.v1.Things was removed"),
    ],
)
def test_a_change_that_breaks_clients_is_found(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert any(words in one for one in found(tmp_path, (old, new))), found(tmp_path, (old, new))


def test_additions_are_compatible(tmp_path: Path) -> None:
    changes = (
        ("string name = 1; }", "string name = 1; optional string zone = 2; }"),
        ("ROUND = 1;", "ROUND = 1; FLAT = 2;"),
        ("rpc Watch", "rpc New(GetRequest) returns (Fresh);\n  rpc Watch"),
        ("message GetRequest", "message Fresh {}\nmessage GetRequest"),
        ('body: "*"}', 'body: "*" additional_bindings {put: "/v1/things" body: "*"}}'),
        ("reserved 9;", "reserved 9, 10;"),
    )
    assert found(tmp_path, *changes) == []


def test_files_that_do_not_compile_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not compile"):
        described(tmp_path, "nonsense")
