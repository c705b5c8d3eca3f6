"""The key schema: the only module that knows how keys are spelled.

It is described in docs/reference/keys.md. A component is percent-encoded, so it contains no ``.`` and no ``/``. The
first all-digits component after the type is the instance, so a key is parsed without knowing its type. Ranges always
end at a delimiter, so a prefix never matches a longer name (``a`` against ``ab``; the Ignite bug of partition 1 against
10).
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.plan import MAX_PARTITIONS
from distop.protocol.records import OperationRef
from distop.protocol.texts import shown

OP, OPEN, PENDING, CLAIM, PERMIT = "distOp", "distOpOpen", "distOpPending", "distOpClaim", "distOpPermit"
NODE, NODE_DRAIN, COORDINATOR, BEHAVIOR, TABLE, TABLE_ACTIONS, HISTORY, HOLD, UNIQUE, REQUEST, WATERMARK, SPACE = (
    "distOpNode",
    "distOpNodeDrain",
    "distOpCoordinator",
    "distOpBehavior",
    "distOpTable",
    "distOpTableActions",
    "distOpHistory",
    "distOpHold",
    "distOpUnique",
    "distOpRequest",
    "distOpWatermark",
    "distOpSpace",
)
REMOVED_TABLE = "distOpRemovedTable"
NOTICE, POLICY, POLICY_EVALUATOR, POLICY_EVENT, POLICY_STATE = (
    "distOpNotice",
    "distOpPolicy",
    "distOpPolicyEvaluator",
    "distOpPolicyEvent",
    "distOpPolicyState",
)
POLICIES = "policies"
"""The name of the notice that policies exist, or existed."""

RESERVED = frozenset({"runOps", "nextInstanceId", "current", "arg", "spec", "state", "plan", "cancel"})
MAX_COMPONENT_BYTES = 255

_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-=:@+")
_ENCODED = [chr(b) if b in _SAFE else f"%{b:02X}" for b in range(256)]
_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]+")
_DIGEST = "sha256:"
"""Prefix of the digest of a request id in its key."""
_EDGE = re.compile(r"[0-9a-f]{20}")
_SLOT = re.compile(r"[0-9]")


@lru_cache(maxsize=65_536)
def encode(name: str) -> str:
    """A name as a key component.

    Raises InvalidArgument for empty names, lone surrogates, and over 255 bytes.
    """
    if not name:
        raise InvalidArgument("a name must not be empty")
    try:
        text = "".join([_ENCODED[b] for b in name.encode()])
    except UnicodeEncodeError:
        raise InvalidArgument(f"the name {name!r} contains a lone surrogate, which is not a character") from None
    if len(text) > MAX_COMPONENT_BYTES:
        raise InvalidArgument(
            f"the name {name[:40]!r}… takes {len(text)} bytes in a key (percent-encoded); at most "
            f"{MAX_COMPONENT_BYTES} are allowed"
        )
    return text


@lru_cache(maxsize=65_536)
def decode(component: str) -> str:
    """The reverse of :func:`encode`. Raises InvalidArgument for escapes that encode() does not write."""
    try:
        name = unquote_to_bytes(component).decode()
        canonical: str | None = encode(name)
    except (UnicodeError, InvalidArgument):
        name, canonical = "", None
    if canonical != component:
        raise InvalidArgument(f"{component!r} is not a key component in its canonical form")
    return name


def _escape_first(text: str) -> str:
    return f"%{ord(text[0]):02X}{text[1:]}"


@lru_cache(maxsize=65_536)
def encode_object(name: str) -> str:
    """An object id as a key component.

    In an id that is all digits or a reserved word the first character is encoded, so that it is never parsed as an
    instance or a key's name.
    """
    text = encode(name)
    text = _escape_first(text) if text.isdigit() or text in RESERVED else text
    if len(text) > MAX_COMPONENT_BYTES:
        raise InvalidArgument(f"the object id {name[:40]!r}… takes over {MAX_COMPONENT_BYTES} bytes in a key")
    return text


@lru_cache(maxsize=65_536)
def decode_object(component: str) -> str:
    """The reverse of :func:`encode_object`."""
    try:
        name = unquote_to_bytes(component).decode()
        canonical: str | None = encode_object(name)
    except (UnicodeError, InvalidArgument):
        name, canonical = "", None
    if canonical != component:
        raise InvalidArgument(f"{component!r} is not an object id in its canonical form")
    return name


def check_type_name(name: object) -> str:
    """The type name itself. Raises InvalidArgument for an invalid one."""
    if not isinstance(name, str):
        raise InvalidArgument(f"an operation type must be a text, not {shown(name)}")
    return _check_type_name(name)


@lru_cache(maxsize=4_096)
def _check_type_name(name: str) -> str:
    if not _TYPE.fullmatch(name) or name in RESERVED:
        raise InvalidArgument(
            f"{shown(name)} is not an operation type: use a letter, then letters, digits, _ and -; not "
            f"{', '.join(sorted(RESERVED))}"
        )
    if len(name) > MAX_COMPONENT_BYTES:
        raise InvalidArgument(f"the operation type {name[:40]!r}… is longer than {MAX_COMPONENT_BYTES} characters")
    return name


def check_namespace(name: str) -> str:
    """The namespace itself ("": none). Raises InvalidArgument for an invalid one."""
    if name and not _NAMESPACE.fullmatch(name):
        raise InvalidArgument(f"{name!r} is not a namespace: use letters, digits, _ and - only")
    if name.startswith(OP):  # its keys would be in the range of keys without a namespace, and of their roles
        raise InvalidArgument(f"{name!r} is not a namespace: the name must not begin with {OP}")
    return name


@frozen
class ParsedKey:
    """The parts of a key.

    ``family`` is the first component; the other fields are set if the key has them. ``name`` is the last word:
    ``runOps``, ``nextInstanceId``, ``current``, or what follows an operation's root (``arg``, ``spec``, ``state``,
    ``cancel``, ``plan``, ``planning``, ``decision``). Of a job's key ``partition`` is its ordinal, and ``name`` is
    ``state``, ``outcome`` or ``progress``. Of a chunk ``name`` is ``plan`` and ``chunk`` its number; of a permit
    ``name`` is ``permit`` and ``chunk`` its number. Of an edge ``name`` is ``after`` or ``next``, and ``id`` the edge.
    Of a watermark ``chunk`` is its slot, and ``name`` is ``young`` or empty.
    """

    family: str
    table: str = ""
    type: str = ""
    ref: OperationRef | None = None
    name: str = ""
    partition: int = -1
    chunk: int = -1
    object: str = ""
    id: str = ""


@lru_cache(maxsize=8_192)
def _ref(table: str, type_name: str, obj: str, instance: str) -> OperationRef:
    if len(instance) > MAX_COMPONENT_BYTES or instance != str(int(instance)):
        raise InvalidArgument(f"{instance[:40]!r} is not an instance number in its canonical form")
    named = decode_object(obj) if obj else ""
    return OperationRef(_same(decode(table)), _same(check_type_name(type_name)), named, int(instance))


_same = lru_cache(maxsize=4_096)(str)
"""Returns one shared text for equal ones: thousands of operations name the same table and type."""


class Keys:
    """Builds and parses the keys of one namespace."""

    __slots__ = ("_last", "_prefix", "namespace")

    def __init__(self, namespace: str = "") -> None:
        self.namespace = check_namespace(namespace)
        self._prefix = f"{namespace}/" if namespace else ""
        self._last: tuple[OperationRef | None, str, str, str] = (None, "", "", "")
        """The operation whose keys were built last: itself, its root, its claims' root, and the suffix of all its keys.
        """

    # ------------------------------------------------------------------ build

    def _op(self, ref: OperationRef, family: str) -> str:
        return f"{self._prefix}{family}{self._of(ref)[3]}"

    def _of(self, ref: OperationRef) -> tuple[OperationRef | None, str, str, str]:
        last = self._last
        if last[0] is not ref:  # many keys of one operation are built in a row
            obj = f".{encode_object(ref.object)}" if ref.object else ""
            name = f".{encode(ref.table)}.{check_type_name(ref.type)}{obj}.{ref.instance}"
            last = self._last = (ref, f"{self._prefix}{OP}{name}", f"{self._prefix}{CLAIM}{name}", name)
        return last

    def everything(self) -> tuple[str, str]:
        """The range of all distop keys of the namespace."""
        return f"{self._prefix}{OP}", f"{self._prefix}{OP[:-1]}q"

    def family(self, family: str) -> tuple[str, str]:
        """The range of a family; ``distOp``: all operations' own keys."""
        return prefix_range(f"{self._prefix}{family}.")

    def run_ops(self, table: str) -> str:
        """How many operations of each type run on a table."""
        return f"{self._prefix}{OP}.{encode(table)}.runOps"

    def next_instance(self, table: str, type_name: str) -> str:
        """The instance counter of a type on a table."""
        return f"{self._prefix}{OP}.{encode(table)}.{check_type_name(type_name)}.nextInstanceId"

    def current(self, table: str, type_name: str, obj: str = "") -> str:
        """The instance that runs, of a type or object that runs one at a time."""
        part = f".{encode_object(obj)}" if obj else ""
        return f"{self._prefix}{OP}.{encode(table)}.{check_type_name(type_name)}{part}.current"

    def type_range(self, table: str, type_name: str) -> tuple[str, str]:
        """The range ``distOp.<table>.<type>.``, which the type's coordinator watches."""
        return prefix_range(f"{self._prefix}{OP}.{encode(table)}.{check_type_name(type_name)}.")

    def type_claims(self, table: str, type_name: str) -> tuple[str, str]:
        """The range ``distOpClaim.<table>.<type>.``."""
        return prefix_range(f"{self._prefix}{CLAIM}.{encode(table)}.{check_type_name(type_name)}.")

    def roots(self, ref: OperationRef) -> tuple[str, str]:
        """The operation's root and the root of its claims, without a delimiter at their ends."""
        return self._of(ref)[1:3]

    def root(self, ref: OperationRef) -> str:
        return self._of(ref)[1]

    def of(self, ref: OperationRef, name: str) -> str:
        """``<root>.<name>``: arg, spec, state, cancel, plan, planning, decision."""
        return f"{self.root(ref)}.{name}"

    def chunk(self, ref: OperationRef, number: int) -> str:
        """One chunk of an operation's plan."""
        return f"{self.root(ref)}.plan.{number:06d}"

    def chunks_range(self, ref: OperationRef) -> tuple[str, str]:
        return prefix_range(f"{self.root(ref)}.plan.")

    def job(self, ref: OperationRef, partition: int, name: str) -> str:
        """``<root>.<partition>.<name>``: state, outcome, progress."""
        return f"{self.roots(ref)[0]}.{ordinal(partition)}.{name}"

    def jobs_range(self, ref: OperationRef) -> tuple[str, str]:
        """The keys of all jobs: their names start with a digit, the operation's own with a letter."""
        root = self.root(ref)
        return f"{root}.0", f"{root}.:"

    def edge(self, ref: OperationRef, name: str, edge: str) -> str:
        """``<root>.after.<edge>`` or ``<root>.next.<edge>`` (``protocol.pending_operations``)."""
        return f"{self.root(ref)}.{name}.{edge}"

    def edges_range(self, ref: OperationRef, name: str) -> tuple[str, str]:
        """All edges of one side: ``after`` or ``next``."""
        return prefix_range(f"{self.root(ref)}.{name}.")

    def gate(self, ref: OperationRef) -> str:
        """The gate: jobs may be claimed while it exists."""
        return self._op(ref, OPEN)

    def pending(self, ref: OperationRef) -> str:
        """The phase of an operation without a gate."""
        return self._op(ref, PENDING)

    def claim(self, ref: OperationRef, partition: int) -> str:
        """The claim of a job."""
        return f"{self.roots(ref)[1]}.{ordinal(partition)}"

    def own_range(self, ref: OperationRef) -> tuple[str, str]:
        """All keys below the operation's root: its own, and those of its jobs."""
        return prefix_range(f"{self.root(ref)}.")

    def claims_range(self, ref: OperationRef) -> tuple[str, str]:
        return prefix_range(f"{self._of(ref)[2]}.")

    def permit(self, ref: OperationRef, number: int) -> str:
        """The job that has the permit of this number (``protocol.permits``)."""
        return f"{self._op(ref, PERMIT)}.{ordinal(number)}"

    def permits_range(self, ref: OperationRef) -> tuple[str, str]:
        return prefix_range(f"{self._op(ref, PERMIT)}.")

    def claims_between(self, ref: OperationRef, first: int, after: int) -> tuple[str, str]:
        """The claims of the ordinals ``first`` to ``after - 1``."""
        return _between(self.roots(ref)[1], first, after)

    def jobs_between(self, ref: OperationRef, first: int, after: int) -> tuple[str, str]:
        """The keys of the jobs ``first`` to ``after - 1``."""
        return _between(self.roots(ref)[0], first, after)

    def node(self, incarnation: str) -> str:
        """A live executor's node key."""
        return f"{self._prefix}{NODE}.{encode(incarnation)}"

    def drain(self, executor: str) -> str:
        """The request that an executor drains.

        In key order it lies between the nodes and the gates, so one watch covers all of them.
        """
        return f"{self._prefix}{NODE_DRAIN}.{encode(executor)}"

    def coordinator(self, table: str, type_name: str) -> str:
        """The election of a type's coordinator on a table."""
        return f"{self._prefix}{COORDINATOR}.{encode(table)}.{check_type_name(type_name)}"

    def hold(self, id_: str) -> str:
        """A hold (``protocol.dependencies``)."""
        return f"{self._prefix}{HOLD}.{encode(id_)}"

    def unique(self, table: str, type_name: str, id_: str) -> str:
        """The holder of an id.

        Daemons do not watch this range: it has as many keys as operations are pending.
        """
        return f"{self._prefix}{UNIQUE}.{encode(table)}.{check_type_name(type_name)}.{encode(id_)}"

    def request(self, table: str, type_name: str, request_id: str) -> str:
        """The operation that a caller's request id has started.

        A digest replaces an id that is too long, is not Unicode, or looks like a digest. Daemons do not watch this
        range.
        """
        try:
            named = encode(request_id)
        except InvalidArgument:
            named = ""
        if not named or request_id.startswith(_DIGEST):
            named = f"{_DIGEST}{hashlib.sha256(request_id.encode(errors='surrogatepass')).hexdigest()}"
        return f"{self._prefix}{REQUEST}.{encode(table)}.{check_type_name(type_name)}.{named}"

    def watermark(self, slot: int) -> str:
        """An age watermark (``protocol.age_watermarks``).

        Daemons do not watch this range.
        """
        return f"{self._prefix}{WATERMARK}.{slot}"

    def young_watermark(self, slot: int) -> str:
        """The key that exists during the first hour of a watermark."""
        return f"{self._prefix}{WATERMARK}.{slot}.young"

    def policy_mark(self) -> str:
        """The key that each transaction that makes a policy writes (``protocol.policy``).

        Daemons see it in the range that they watch anyway. They watch policies only if it exists.
        """
        return f"{self._prefix}{NOTICE}.{POLICIES}"

    def policy(self, table: str, name: str) -> str:
        """A policy of a table."""
        return f"{self._prefix}{POLICY}.{encode(table)}.{encode(name)}"

    def policy_state(self, table: str, name: str) -> str:
        """What was evaluated of a policy. Daemons do not watch this range."""
        return f"{self._prefix}{POLICY_STATE}.{encode(table)}.{encode(name)}"

    def policy_event(self, table: str, name: str) -> str:
        """The events that wait for an evaluation of a policy."""
        return f"{self._prefix}{POLICY_EVENT}.{encode(table)}.{encode(name)}"

    def policy_evaluator(self, table: str) -> str:
        """The election of the evaluator of a table's policies."""
        return f"{self._prefix}{POLICY_EVALUATOR}.{encode(table)}"

    def policies_watched(self) -> tuple[str, str]:
        """The range of policies, their evaluators and their events, which are adjacent in key order."""
        return self.family(POLICY)[0], self.family(POLICY_EVENT)[1]

    def space(self) -> str:
        """The namespace's id (``store.cluster_identity``)."""
        return f"{self._prefix}{SPACE}"

    def behavior(self, type_name: str) -> str:
        """The declaration of a type."""
        return f"{self._prefix}{BEHAVIOR}.{check_type_name(type_name)}"

    def table(self, table: str) -> str:
        """A table's record."""
        return f"{self._prefix}{TABLE}.{encode(table)}"

    def table_actions(self, table: str) -> str:
        """The recorded actions on a table (``protocol.user_actions``).

        The key stays when the table is removed.
        """
        return f"{self._prefix}{TABLE_ACTIONS}.{encode(table)}"

    def removed_table(self, ref: OperationRef) -> str:
        """The record of a table that the plan of this operation has removed (``table_registry.removal``).

        Submitters cannot write it. Daemons do not watch this range.
        """
        return self._op(ref, REMOVED_TABLE)

    def history(self, ref: OperationRef) -> str:
        """The history record of an operation."""
        return self._op(ref, HISTORY)

    def history_chunk(self, ref: OperationRef, number: int) -> str:
        return f"{self._op(ref, HISTORY)}.plan.{number:06d}"

    def beside_history(self, ref: OperationRef, name: str) -> str:
        """``arg`` and ``spec`` beside the history record of an operation that may be rerun."""
        return f"{self._op(ref, HISTORY)}.{name}"

    def history_range(self, table: str) -> tuple[str, str]:
        return prefix_range(f"{self._prefix}{HISTORY}.{encode(table)}.")

    # ------------------------------------------------------------------ parse

    def parse(self, key: str) -> ParsedKey:
        """The parts of a key. Raises InvalidArgument for a key that this schema does not write."""
        if not key.startswith(self._prefix):
            raise InvalidArgument(f"{key!r} is not in the namespace {self.namespace!r}")
        family, *parts = key[len(self._prefix) :].split(".")
        if family in (NODE, NODE_DRAIN, HOLD, BEHAVIOR, TABLE, TABLE_ACTIONS) and len(parts) == 1:
            if family in (NODE, NODE_DRAIN, HOLD):
                return ParsedKey(family, id=decode(parts[0]))
            if family == BEHAVIOR:
                return ParsedKey(family, type=check_type_name(parts[0]))
            return ParsedKey(family, table=decode(parts[0]))
        if family == COORDINATOR and len(parts) == 2:
            return ParsedKey(family, decode(parts[0]), check_type_name(parts[1]))
        if family in (POLICY, POLICY_STATE, POLICY_EVENT) and len(parts) == 2:
            return ParsedKey(family, decode(parts[0]), id=decode(parts[1]))
        if family == POLICY_EVALUATOR and len(parts) == 1:
            return ParsedKey(family, decode(parts[0]))
        if family == NOTICE and parts == [POLICIES]:
            return ParsedKey(family, id=POLICIES)
        if family in (UNIQUE, REQUEST) and len(parts) == 3:
            return ParsedKey(family, decode(parts[0]), check_type_name(parts[1]), id=decode(parts[2]))
        if family == SPACE and not parts:
            return ParsedKey(family)
        if family == WATERMARK and _SLOT.fullmatch(parts[0]) and parts[1:] in ([], ["young"]):
            return ParsedKey(family, chunk=int(parts[0]), name=".".join(parts[1:]))
        if family == OP and len(parts) == 2 and parts[1] == "runOps":
            return ParsedKey(family, decode(parts[0]), name="runOps")
        if family == OP and 3 <= len(parts) <= 4 and parts[-1] in ("nextInstanceId", "current"):
            if len(parts) == 3:
                return ParsedKey(family, decode(parts[0]), check_type_name(parts[1]), name=parts[2])
            if parts[3] == "current":
                table, type_name, obj = decode(parts[0]), check_type_name(parts[1]), decode_object(parts[2])
                return ParsedKey(family, table, type_name, name="current", object=obj)
        if family in (OP, OPEN, PENDING, CLAIM, PERMIT, HISTORY, REMOVED_TABLE) and len(parts) >= 3:
            return self._parse_operation(key, family, parts)
        raise InvalidArgument(f"{key!r} is not a key of distop")

    @staticmethod
    def _parse_operation(key: str, family: str, parts: list[str]) -> ParsedKey:
        if parts[2].isascii() and parts[2].isdigit():
            ref, rest = _ref(parts[0], parts[1], "", parts[2]), parts[3:]
        elif len(parts) > 3 and parts[3].isascii() and parts[3].isdigit():
            ref, rest = _ref(parts[0], parts[1], parts[2], parts[3]), parts[4:]
        else:
            raise InvalidArgument(f"{key!r} has no instance number")
        parsed: ParsedKey | None = None
        if family in (OPEN, PENDING, REMOVED_TABLE) and not rest:
            parsed = ParsedKey(family, ref.table, ref.type, ref)
        elif family == CLAIM and len(rest) == 1:
            parsed = ParsedKey(family, ref.table, ref.type, ref, partition=parse_ordinal(rest[0]))
        elif family == PERMIT and len(rest) == 1:
            parsed = ParsedKey(family, ref.table, ref.type, ref, "permit", chunk=parse_ordinal(rest[0]))
        elif family == HISTORY and not rest:
            parsed = ParsedKey(family, ref.table, ref.type, ref)
        elif family in (OP, HISTORY) and len(rest) == 2 and rest[0] == "plan":
            parsed = ParsedKey(family, ref.table, ref.type, ref, "plan", chunk=parse_ordinal(rest[1]))
        elif len(rest) == 1 and rest[0] in {OP: OPERATION_NAMES, HISTORY: HISTORY_NAMES}.get(family, ()):
            parsed = ParsedKey(family, ref.table, ref.type, ref, rest[0])
        elif family == OP and len(rest) == 2 and rest[0] in EDGE_NAMES and _EDGE.fullmatch(rest[1]):
            parsed = ParsedKey(family, ref.table, ref.type, ref, rest[0], id=rest[1])
        elif family == OP and len(rest) == 2 and rest[1] in JOB_NAMES:
            parsed = ParsedKey(family, ref.table, ref.type, ref, rest[1], partition=parse_ordinal(rest[0]))
        if parsed is None:
            raise InvalidArgument(f"{key!r} is not a key of distop")
        return parsed


OPERATION_NAMES = frozenset({"arg", "spec", "state", "cancel", "plan", "planning", "decision", "options", "actions"})
EDGE_NAMES = frozenset({"after", "next"})
JOB_NAMES = frozenset({"state", "outcome", "progress"})
HISTORY_NAMES = frozenset({"arg", "spec"})
"""Names of keys beside a history record, besides chunks; the record's own key has no name."""


def _between(root: str, first: int, after: int) -> tuple[str, str]:
    return f"{root}.{ordinal(first)}", f"{root}.{ordinal(after) if after < MAX_PARTITIONS else ':'}"


def ordinal(partition: int) -> str:
    """A partition's ordinal as six digits. Raises InvalidArgument from a million on."""
    if not 0 <= partition < MAX_PARTITIONS:
        raise InvalidArgument(f"partition {partition} is out of range: an operation has at most a million partitions")
    return f"{partition:06d}"


def claim_ordinal(key: str) -> int:
    """The ordinal at the end of a claim's key; the key is not checked."""
    return int(key[-6:])


def job_name(key: str) -> tuple[int, str]:
    """The ordinal and the name ("state", "outcome") in a job's key; the key is not checked."""
    head, _, name = key.rpartition(".")
    return int(head[-6:]), name


def state_ordinal(key: str) -> int | None:
    """The ordinal in the key of a job's state; None for a job's other keys."""
    return int(key[-12:-6]) if key.endswith(".state") else None


def parse_ordinal(text: str) -> int:
    """The reverse of :func:`ordinal`."""
    if len(text) != 6 or not (text.isascii() and text.isdigit()):
        raise InvalidArgument(f"{text!r} is not an ordinal of six digits")
    return int(text)


def prefix_range(prefix: str) -> tuple[str, str]:
    """The range of all keys that start with ``prefix``, which ends in a delimiter (``.``, so the end is ``/``)."""
    return prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)
