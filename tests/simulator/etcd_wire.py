"""Converts etcd's messages on the server's side: requests to ``protocol.txn`` values, results to responses. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.txn import (
    Compare,
    Delete,
    DeleteResult,
    Get,
    GetResult,
    KeyValue,
    Put,
    PutResult,
    Relation,
    Target,
    Txn,
    TxnOperation,
    TxnResult,
)
from distop.store._proto import kv_pb2 as kv
from distop.store._proto import rpc_pb2 as rpc
from distop.store.etcd_messages import to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.protocol.revisioned import Change
    from distop.protocol.txn import TxnOperationResult

_TARGETS = tuple(Target)
_RELATIONS = tuple(Relation)


def to_text(key: bytes) -> str:
    """Decode a key."""
    return key.decode("utf-8", "surrogateescape")


def decode_txn(request: rpc.TxnRequest) -> Txn:
    """Decode a transaction request."""
    return Txn(
        tuple([_compare(one) for one in request.compare]),
        tuple([_operation(one) for one in request.success]),
        tuple([_operation(one) for one in request.failure]),
    )


def _compare(message: rpc.Compare) -> Compare:
    value: int | bytes
    target = _TARGETS[message.target]
    if target is Target.MOD:
        value = message.mod_revision
    elif target is Target.CREATE:
        value = message.create_revision
    elif target is Target.VALUE:
        value = message.value
    else:
        value = message.version
    return Compare(to_text(message.key), target, _RELATIONS[message.result], value, to_text(message.range_end))


def _operation(message: rpc.RequestOp) -> TxnOperation:
    which = message.WhichOneof("request")
    if which == "request_put":
        put = message.request_put
        return Put(to_text(put.key), put.value, put.lease)
    if which == "request_range":
        return decode_get(message.request_range)
    if which == "request_delete_range":
        delete = message.request_delete_range
        return Delete(to_text(delete.key), to_text(delete.range_end))
    return decode_txn(message.request_txn)


def decode_get(message: rpc.RangeRequest) -> Get:
    """Decode a range request, without its revision."""
    return Get(to_text(message.key), to_text(message.range_end), message.limit, message.keys_only, message.count_only)


def key_value(pair: KeyValue) -> kv.KeyValue:
    """Encode a key with its value."""
    return kv.KeyValue(
        key=to_bytes(pair.key),
        value=pair.value,
        mod_revision=pair.mod_revision,
        create_revision=pair.create_revision,
        version=pair.version,
        lease=pair.lease,
    )


def event(change: Change) -> kv.Event:
    """Encode a change as an event."""
    return kv.Event(type=kv.Event.DELETE if change.deleted else kv.Event.PUT, kv=key_value(change.kv))


def encode_range(result: GetResult) -> rpc.RangeResponse:
    """Encode the result of a read."""
    return rpc.RangeResponse(kvs=[key_value(pair) for pair in result.kvs], more=result.more, count=result.count)


def encode_txn(result: TxnResult) -> rpc.TxnResponse:
    """Encode the result of a transaction."""
    response = rpc.TxnResponse(succeeded=result.succeeded)
    _fill(response, result.responses)
    return response


def _fill(response: rpc.TxnResponse, results: Iterable[TxnOperationResult]) -> None:
    for result in results:
        one = response.responses.add()
        if isinstance(result, PutResult):
            one.response_put.SetInParent()
        elif isinstance(result, GetResult):
            one.response_range.CopyFrom(encode_range(result))
        elif isinstance(result, DeleteResult):
            one.response_delete_range.deleted = result.deleted
        else:
            one.response_txn.succeeded = result.succeeded
            _fill(one.response_txn, result.responses)
