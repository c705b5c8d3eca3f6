"""Converts transactions of ``protocol.txn`` to etcd's messages, and results back. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.txn import (
    Delete,
    DeleteResult,
    Get,
    GetResult,
    KeyValue,
    Put,
    PutResult,
    Target,
    Txn,
    TxnOperation,
    TxnOperationResult,
    TxnResult,
)
from distop.store._proto import rpc_pb2 as rpc

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.store._proto import kv_pb2 as kv

_PUT = PutResult()


def to_bytes(key: str) -> bytes:
    """A key as bytes. Foreign keys that are not UTF-8 keep their bytes in both directions."""
    return key.encode("utf-8", "surrogateescape")


def key_value(pair: kv.KeyValue) -> KeyValue:
    """A key-value pair from etcd's message."""
    return KeyValue(
        pair.key.decode("utf-8", "surrogateescape"),
        pair.value,
        pair.mod_revision,
        pair.create_revision,
        pair.version,
        pair.lease,
    )


def encode_txn(txn: Txn) -> rpc.TxnRequest:
    """The request for a transaction."""
    request = rpc.TxnRequest()
    _fill(request, txn)
    return request


def _fill(request: rpc.TxnRequest, txn: Txn) -> None:
    for compare in txn.compares:
        message = request.compare.add()
        message.result = compare.relation  # type: ignore[assignment]  # the numbers are etcd's
        message.target = compare.target  # type: ignore[assignment]
        message.key = to_bytes(compare.key)
        if compare.range_end:
            message.range_end = to_bytes(compare.range_end)
        value = compare.value
        if compare.target is Target.VALUE:
            if not isinstance(value, bytes):
                raise TypeError(f"a compare of the value of {compare.key} needs bytes, not {type(value).__name__}")
            message.value = value
        else:
            if not isinstance(value, int):
                raise TypeError(f"a compare of a revision or version needs an int, not {type(value).__name__}")
            if compare.target is Target.MOD:
                message.mod_revision = value
            elif compare.target is Target.CREATE:
                message.create_revision = value
            else:
                message.version = value
    for branch, operations in ((request.success, txn.success), (request.failure, txn.failure)):
        for operation in operations:
            _fill_operation(branch.add(), operation)


def _fill_operation(message: rpc.RequestOp, operation: TxnOperation) -> None:
    if isinstance(operation, Put):
        put = message.request_put
        put.key = to_bytes(operation.key)
        put.value = operation.value
        if operation.lease:
            put.lease = operation.lease
    elif isinstance(operation, Get):
        fill_get(message.request_range, operation)
    elif isinstance(operation, Delete):
        delete = message.request_delete_range
        delete.key = to_bytes(operation.key)
        if operation.range_end:
            delete.range_end = to_bytes(operation.range_end)
    else:
        nested = message.request_txn
        nested.SetInParent()
        _fill(nested, operation)


def fill_get(message: rpc.RangeRequest, get: Get) -> None:
    """Write a read into its message: always of the current revision, never of a past one (T6)."""
    message.key = to_bytes(get.key)
    if get.range_end:
        message.range_end = to_bytes(get.range_end)
    message.limit = get.limit
    message.keys_only = get.keys_only
    message.count_only = get.count_only


def decode_txn(response: rpc.TxnResponse, *, repeated: bool = False) -> TxnResult:
    """The result of a transaction."""
    return TxnResult(response.succeeded, response.header.revision, _results(response.responses), repeated)


def _results(responses: Iterable[rpc.ResponseOp]) -> tuple[TxnOperationResult, ...]:
    results: list[TxnOperationResult] = []
    for response in responses:
        which = response.WhichOneof("response")
        if which == "response_put":
            results.append(_PUT)
        elif which == "response_range":
            results.append(decode_range(response.response_range))
        elif which == "response_delete_range":
            results.append(DeleteResult(response.response_delete_range.deleted))
        else:
            results.append(decode_txn(response.response_txn))
    return tuple(results)


def decode_range(response: rpc.RangeResponse) -> GetResult:
    """The result of a read."""
    return GetResult(tuple(map(key_value, response.kvs)), response.more, response.count)
