"""Signatures of history records, and the key that they are made with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from distop.errors import InvalidArgument
from distop.protocol.record_signature import signature, why_refused, why_unsigned
from distop.protocol.records import History, State
from distop.settings import Settings, executor_config

KEY = b"k" * 32
REPORT = {"certificate": {"version": "7", "checks": [{"name": "a", "check": {"range": {"min": 0.1}}}]}, "rows": 3}
RECORD = History("t/validate/1", State.SUCCESS, "", "", 1, 1, 0, report=REPORT)


def signed(record: History, key: bytes = KEY, namespace: str = "ns") -> History:
    return replace(record, signature=signature(key, namespace, record))


def test_hole_8_a_signed_record_read_from_etcd_is_accepted() -> None:
    found = History.decode(signed(RECORD).encode())
    assert found.signature.startswith("hmac-sha256-")
    assert why_unsigned(KEY, "ns", found) == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"op": "t/validate/2"},
        {"op": "u/validate/1"},
        {"op": "t/echo/1"},
        {"state": State.FAILED},
        {"report": {**REPORT, "certificate": {"version": "8", "checks": REPORT["certificate"]["checks"]}}},  # type: ignore[index]
        {"report": {**REPORT, "rows": 4}},
        {"signature": "hmac-sha256-é"},
        {"signature": "x"},
    ],
)
def test_hole_8_a_forged_record_is_refused(changed: dict[str, object]) -> None:
    forged = replace(signed(RECORD), **changed)  # type: ignore[arg-type]
    assert "signature does not match the key" in why_unsigned(KEY, "ns", forged)


def test_hole_8_a_record_of_another_key_or_namespace_or_without_signature_is_refused() -> None:
    assert "signature does not match the key" in why_unsigned(b"x" * 32, "ns", signed(RECORD))
    assert "signature does not match the key" in why_unsigned(KEY, "", signed(RECORD))
    assert why_unsigned(KEY, "ns", RECORD).startswith("it is not signed, but this executor has a certificate-key-file")


def test_hole_8_a_signed_record_under_the_key_of_another_operation_is_refused() -> None:
    """An attacker copies a signed record to another key."""
    assert why_refused("t/validate/1", KEY, "ns", signed(RECORD)) == ""
    assert why_refused("t/validate/2", KEY, "ns", signed(RECORD)) == "it is the record of another operation"
    assert why_refused("t/validate/2", None, "ns", RECORD) == "it is the record of another operation"
    assert "not signed" in why_refused("t/validate/1", KEY, "ns", RECORD)


def key_file(folder: Path, data: bytes = KEY, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def configured(path: str) -> bytes:
    return executor_config(Settings({"certificate_key_file": path, "work_dir": "w"}, {})).certificate_key


def test_hole_8_the_key_is_read_from_a_private_file(tmp_path: Path) -> None:
    assert configured(key_file(tmp_path)) == KEY
    config = executor_config(Settings({"certificate_key_file": key_file(tmp_path)}, {}))
    assert "kkkk" not in repr(config)
    assert executor_config(Settings({}, {})).certificate_key == b""


@pytest.mark.timeout(10)
def test_hole_8_a_key_file_that_others_may_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    for mode in (0o640, 0o604, 0o620):
        with pytest.raises(InvalidArgument, match="chmod 600"):
            configured(key_file(tmp_path, mode=mode))
    for data in (b"", b"k" * 31, b"k" * 4097):
        with pytest.raises(InvalidArgument, match="must have 32 to 4096 bytes"):
            configured(key_file(tmp_path, data))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        configured(str(tmp_path / "none"))
    os.mkfifo(tmp_path / "pipe")
    for other in ("pipe", "/dev/zero"):
        with pytest.raises(InvalidArgument, match="is no regular file"):
            configured(str(tmp_path / other))
