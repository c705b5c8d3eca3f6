"""Signatures of reports in history records.

Executors with a key (``certificate-key-file``) sign and check them. Anyone who may write to etcd may write a history
record, and with it a certificate. A signature proves that an executor with the key wrote the report of this operation
in this namespace. Pure.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import TYPE_CHECKING

from distop.protocol.records import OperationRef

if TYPE_CHECKING:
    from distop.protocol.records import History

_PURPOSE = "distop history report 1"
_SCHEME = "hmac-sha256-"


def signature(key: bytes, namespace: str, history: History) -> str:
    """HMAC-SHA-256 over the operation and its report, in canonical form.

    It covers the namespace, table, type, object, instance, state and report; the report contains a certificate's
    version and checks.
    """
    ref = OperationRef.parse(history.op)
    signed = [
        *(_PURPOSE, namespace, ref.table, ref.type, ref.object, ref.instance, str(history.state)),
        history.report,
    ]
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{_SCHEME}{hmac.new(key, text.encode(), hashlib.sha256).hexdigest()}"


def why_unsigned(key: bytes, namespace: str, history: History) -> str:
    """Why the record is not accepted as signed with this key; "": it is."""
    if not history.signature:
        return (
            "it is not signed, but this executor has a certificate-key-file: give all executors that key, and run the "
            "operation again"
        )
    try:
        right = hmac.compare_digest(history.signature.encode(), signature(key, namespace, history).encode())
    except (ValueError, TypeError):
        right = False
    return "" if right else "its signature does not match the key in this executor's certificate-key-file"


def why_refused(op: str, key: bytes | None, namespace: str, record: History) -> str:
    """Why a record is not accepted as the one of operation ``op``; "": it is.

    With a ``key``, it must be signed.
    """
    if record.op != op:
        return "it is the record of another operation"
    return why_unsigned(key, namespace, record) if key else ""
