"""Operation types without code, whose jobs run in custom worker loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from distop.errors import InvalidArgument, NotAllowed
from distop.protocol.behavior_declaration import Declaration, Retry
from distop.protocol.caller_values import LONGEST_DELAY, seconds, text
from distop.protocol.json_codec import loads
from distop.protocol.keys import check_type_name
from distop.protocol.record_reading import read
from distop.protocol.texts import shown
from distop.protocol.txn import Get, GetResult, Put, Txn, unchanged
from distop.schemas.argument_schema import encode_json
from distop.schemas.schema_bounds import check_form
from distop.services.submission.option_values import times
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.store.client import EtcdClient

LONGEST_DESCRIPTION = 10_000
"""Characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeOptions:
    """What a type without code may declare (docs/how-to/write-a-behavior.md)."""

    result_schema: Mapping[str, Any] | None = None
    object_field: str | None = None
    instances: str = "many"
    conflicts_with: Iterable[str] = ()
    can_fail: bool = True
    retry: Retry | None = None
    lost: str = "retry"
    failure_policy: str = "fail_fast"
    description: str = ""

    def declaration(self, type_name: str, arg_schema: Mapping[str, Any] | None = None) -> Declaration:
        """The declaration. Raises InvalidArgument if it contradicts itself."""
        check_type_name(type_name)
        self._check_words(type_name)
        retry = _checked_retry(type_name, self.retry)
        if not self.can_fail and self.lost == "fail":
            raise InvalidArgument(f"type {type_name}: can_fail is false, so lost must be 'retry'")
        arg = _schema(type_name, arg_schema, "arg_schema")
        names = arg.get("properties") or {}
        if self.object_field is not None and not (isinstance(self.object_field, str) and self.object_field in names):
            raise InvalidArgument(
                f"type {type_name}: object_field {shown(self.object_field)} is not a property of its arg_schema"
            )
        return Declaration(
            type_name,
            arg,
            _schema(type_name, self.result_schema, "result_schema"),
            object_field=self.object_field,
            instances=self.instances,
            conflicts_with=tuple(map(check_type_name, self.conflicts_with)),
            can_fail=bool(self.can_fail),
            retry=retry,
            lost=self.lost,
            failure_policy=self.failure_policy,
            completes=False,
            description=text(self.description, "the description of a type", LONGEST_DESCRIPTION),
            cleans=False,
            code=False,
        )

    def _check_words(self, type_name: str) -> None:
        """Raises InvalidArgument for a word that is not one of those allowed, and for conflicts that are no list."""
        for value, allowed, what in (
            (self.instances, ("many", "one"), "instances"),
            (self.lost, ("retry", "fail"), "lost"),
            (self.failure_policy, ("fail_fast", "collect_all"), "failure_policy"),
        ):
            if not isinstance(value, str) or value not in allowed:
                raise InvalidArgument(
                    f"type {type_name}: {what} must be one of {', '.join(allowed)}, not {shown(value)}"
                )
        if isinstance(self.conflicts_with, str) or not isinstance(self.conflicts_with, Iterable):
            raise InvalidArgument(
                f"type {type_name}: conflicts_with must be a list of types, such as [{shown(self.conflicts_with)}]"
            )


class TypeKeywords(TypedDict, total=False):
    """What ``register_type`` takes, for the type checker."""

    result_schema: Mapping[str, Any] | None
    object_field: str | None
    instances: str
    conflicts_with: Iterable[str]
    can_fail: bool
    retry: Retry | None
    lost: str
    failure_policy: str
    description: str


def _checked_retry(type_name: str, retry: Retry | None) -> Retry:
    retry = retry if retry is not None else Retry()
    if not isinstance(retry, Retry):
        raise InvalidArgument(f"type {type_name}: retry must be a distop.behavior.Retry, not {shown(retry)}")
    times(retry.attempts, f"type {type_name}: the attempts of retry must be")
    for pause in (retry.initial, retry.maximum):
        if seconds(pause, f"type {type_name}: the back-off of retry") > LONGEST_DELAY:
            raise InvalidArgument(f"type {type_name}: the back-off of retry is longer than a hundred years")
    return retry


def _schema(type_name: str, schema: Mapping[str, Any] | None, what: str) -> Mapping[str, Any]:
    if schema is None:
        return {}
    dump = getattr(schema, "model_json_schema", None)
    schema = dump() if callable(dump) else schema
    try:
        if not isinstance(schema, Mapping):
            raise TypeError(f"it is {shown(schema)}")
        plain: Mapping[str, Any] = loads(encode_json(dict(schema), what))
        check_form(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"type {type_name}: {what} is not an accepted JSON Schema: {error!s:.300}") from None
    return plain


async def register(etcd: EtcdClient, keys: Keys, wanted: Declaration, *, replace: bool) -> None:
    """Publish a declaration.

    Raises NotAllowed if there is another declaration of the type, OutcomeUnknown.
    """
    key, value = keys.behavior(wanted.type_name), wanted.encode()
    seen = await etcd.get(key)
    while seen is None or seen.value != value:
        if seen is not None and (there := read(Declaration.decode, seen)).code:
            raise NotAllowed(
                f"executors offer a behavior with the name {wanted.type_name} "
                f"({there.description or 'no description'}): choose another name"
            )
        if seen is not None and not replace:
            raise NotAllowed(
                f"the type {wanted.type_name} is already registered with another declaration: replace it "
                "(replace=True), or choose another name"
            )
        mod = seen.mod_revision if seen is not None else 0
        result = await etcd.commit(
            Txn((unchanged(key, mod),), (Put(key, value),), (Get(key),), "register"), deadline=WRITE_LIMIT
        )
        if result.succeeded:
            return
        (found,) = result.responses
        seen = found.kv if isinstance(found, GetResult) else None
