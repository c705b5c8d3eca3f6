"""Keys: any name survives the way there and back, and no name's range reaches into another's."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef

KEYS = [Keys(), Keys("prod")]

AWKWARD = [
    "sales.orders",
    "a/b",
    "100%",
    "%2E",
    "a%2Eb",
    "表格",
    "таблица",
    "😀",
    "👩‍👩‍👧",
    "a b",
    "\n",
    "\x00",
    "7",
    "007",
    "٣",
    "runOps",
    "state",
    "current",
    "nextInstanceId",
    "plan",
    "planning",
    "decision",
    "arg",
    "@cluster",
    "=:@+",
    "é",
    "é",
    "\xff",
    "*",
    "~",
    "distOp",
    "000001",
    "..",
    ".",
    "/",
    "000000.state",
]
names = st.one_of(
    st.sampled_from(AWKWARD),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    st.text("ab.%/0", min_size=1, max_size=6),
).filter(lambda s: len("".join(K._ENCODED[b] for b in s.encode())) <= 250)
types = st.one_of(
    st.sampled_from(["noop", "validate", "build-index", "planning", "decision", "A", "z_9"]),
    st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,10}", fullmatch=True),
).filter(lambda s: s not in K.RESERVED)
refs = st.builds(OperationRef, names, types, st.one_of(st.just(""), names), st.integers(0, 10**12))
partitions = st.integers(0, 999_999)


def is_within(key: str, bounds: tuple[str, str]) -> bool:
    return bounds[0] <= key < bounds[1]


@given(names)
def test_component_round_trip(name: str) -> None:
    text = K.encode(name)
    assert K.decode(text) == name
    assert text.isascii()
    assert not set(text) & set("./ ")
    assert K.decode_object(K.encode_object(name)) == name


@given(names)
def test_an_object_is_never_parsed_as_an_instance_or_a_reserved_word(name: str) -> None:
    text = K.encode_object(name)
    assert not text.isdigit()
    assert text not in K.RESERVED


@pytest.mark.parametrize("keys", KEYS, ids=lambda k: k.namespace or "none")
@given(ref=refs, p=partitions, incarnation=names)
@example(ref=OperationRef("runOps", "planning", "planning", 7), p=0, incarnation="x")
@example(ref=OperationRef("7", "a", "7", 7), p=999_999, incarnation="7")
def test_every_key_parses_back(keys: Keys, ref: OperationRef, p: int, incarnation: str) -> None:
    whole = {"table": ref.table, "type": ref.type, "ref": ref}

    def check(key: str, family: str, **fields: object) -> None:
        assert keys.parse(key) == K.ParsedKey(family, **fields)

    for name in K.OPERATION_NAMES:
        check(keys.of(ref, name), K.OP, **whole, name=name)
    for name in K.JOB_NAMES:
        check(keys.job(ref, p, name), K.OP, **whole, name=name, partition=p)
    check(keys.chunk(ref, p), K.OP, **whole, name="plan", chunk=p)
    check(keys.gate(ref), K.OPEN, **whole)
    check(keys.removed_table(ref), K.REMOVED_TABLE, **whole)
    check(keys.pending(ref), K.PENDING, **whole)
    check(keys.claim(ref, p), K.CLAIM, **whole, partition=p)
    check(keys.history(ref), K.HISTORY, **whole)
    for name in K.HISTORY_NAMES:
        check(keys.beside_history(ref, name), K.HISTORY, **whole, name=name)
    check(keys.history_chunk(ref, p), K.HISTORY, **whole, name="plan", chunk=p)
    check(keys.run_ops(ref.table), K.OP, table=ref.table, name="runOps")
    check(keys.next_instance(ref.table, ref.type), K.OP, table=ref.table, type=ref.type, name="nextInstanceId")
    check(
        keys.current(ref.table, ref.type, ref.object),
        K.OP,
        table=ref.table,
        type=ref.type,
        name="current",
        object=ref.object,
    )
    check(keys.coordinator(ref.table, ref.type), K.COORDINATOR, table=ref.table, type=ref.type)
    check(keys.behavior(ref.type), K.BEHAVIOR, type=ref.type)
    check(keys.unique(ref.table, ref.type, incarnation), K.UNIQUE, table=ref.table, type=ref.type, id=incarnation)
    check(keys.request(ref.table, ref.type, incarnation), K.REQUEST, table=ref.table, type=ref.type, id=incarnation)
    check(keys.watermark(3), K.WATERMARK, chunk=3)
    check(keys.young_watermark(3), K.WATERMARK, chunk=3, name="young")
    check(keys.space(), K.SPACE)
    check(keys.policy_mark(), K.NOTICE, id=K.POLICIES)
    check(keys.policy(ref.table, incarnation), K.POLICY, table=ref.table, id=incarnation)
    check(keys.policy_state(ref.table, incarnation), K.POLICY_STATE, table=ref.table, id=incarnation)
    check(keys.policy_event(ref.table, incarnation), K.POLICY_EVENT, table=ref.table, id=incarnation)
    check(keys.policy_evaluator(ref.table), K.POLICY_EVALUATOR, table=ref.table)
    check(keys.table(ref.table), K.TABLE, table=ref.table)
    check(keys.node(incarnation), K.NODE, id=incarnation)


def all_keys(keys: Keys, ref: OperationRef) -> set[str]:
    return {
        *(keys.of(ref, name) for name in K.OPERATION_NAMES),
        *(keys.job(ref, p, name) for name in K.JOB_NAMES for p in (0, 999_999)),
        keys.chunk(ref, 0),
        keys.gate(ref),
        keys.pending(ref),
        keys.claim(ref, 0),
        keys.claim(ref, 999_999),
        keys.history(ref),
    }


@given(st.lists(refs, min_size=2, max_size=4, unique=True))
@example([OperationRef("a", "t", "", 1), OperationRef("a", "t", "", 10)])
@example([OperationRef("a", "t", "1", 1), OperationRef("a", "t", "", 1)])
@example([OperationRef("a", "t", "", 1), OperationRef("a.t", "t", "", 1), OperationRef("ab", "t", "", 1)])
@example([OperationRef("a", "t", "x", 1), OperationRef("a", "t-x", "", 1), OperationRef("a", "tx", "", 1)])
def test_operations_never_share_keys_or_ranges(several: list[OperationRef]) -> None:
    for keys in KEYS:
        for ref in several:
            for other in several:
                if other == ref:
                    continue
                theirs = all_keys(keys, other)
                assert not all_keys(keys, ref) & theirs
                for bounds in (
                    K.prefix_range(f"{keys.root(ref)}."),
                    keys.jobs_range(ref),
                    keys.claims_range(ref),
                    keys.chunks_range(ref),
                ):
                    assert not any(is_within(key, bounds) for key in theirs)
                if other.table != ref.table:
                    assert not any(is_within(key, keys.history_range(ref.table)) for key in theirs)
                if (other.table, other.type) != (ref.table, ref.type):
                    assert not any(is_within(key, keys.type_range(ref.table, ref.type)) for key in theirs)
                    assert not any(is_within(key, keys.type_claims(ref.table, ref.type)) for key in theirs)


@given(refs, partitions)
def test_ranges_contain_the_right_keys(ref: OperationRef, p: int) -> None:
    for keys in KEYS:
        own = [keys.of(ref, n) for n in K.OPERATION_NAMES]
        jobs = [keys.job(ref, p, n) for n in K.JOB_NAMES]
        assert all(is_within(k, K.prefix_range(f"{keys.root(ref)}.")) for k in [*own, *jobs, keys.chunk(ref, p)])
        assert all(is_within(k, keys.jobs_range(ref)) for k in jobs)
        assert not any(is_within(k, keys.jobs_range(ref)) for k in [*own, keys.chunk(ref, p)])
        assert is_within(keys.claim(ref, p), keys.claims_range(ref))
        assert is_within(keys.claim(ref, p), keys.type_claims(ref.table, ref.type))
        assert is_within(keys.chunk(ref, p), keys.chunks_range(ref))
        assert not is_within(keys.of(ref, "plan"), keys.chunks_range(ref))
        assert not is_within(keys.of(ref, "planning"), keys.chunks_range(ref))
        assert all(is_within(k, keys.type_range(ref.table, ref.type)) for k in [*own, *jobs])
        assert all(is_within(k, keys.family(K.OP)) for k in [*own, *jobs])
        assert not is_within(keys.gate(ref), keys.family(K.OP))
        assert is_within(keys.history(ref), keys.history_range(ref.table))


@given(st.text(st.sampled_from([*"distOp.Claim/%20Z7", "é", "\ud800"]), max_size=40), st.sampled_from(KEYS))
@example("distOp", Keys())
@example("distOpNode.", Keys())
@example("distOp.t.noop.1.state.x", Keys())
@example("distOp.t.noop.٣.state", Keys())
@example("distOpNode.\ud800", Keys())
@example("distOp.t.noop." + "9" * 5000 + ".state", Keys())
def test_only_keys_of_distop_parse(text: str, keys: Keys) -> None:
    """What parses is what the schema writes: building it again gives the same text."""
    try:
        parsed = keys.parse(text)
    except InvalidArgument:
        return
    assert parsed.family in (K.OP, K.OPEN, K.PENDING, K.CLAIM, K.NODE, K.COORDINATOR, K.BEHAVIOR, K.TABLE, K.HISTORY)
    if parsed.ref is not None:
        assert K.encode(parsed.table) in text


@pytest.mark.parametrize(
    "key",
    [
        "distOp.sales%2eorders.noop.1.state",  # escapes are in capitals
        "distOp.%61.noop.1.state",  # a needs no escape
        "distOp.a.noop.01.state",
        "distOp.a.noop.7.7.state",  # an object of digits alone has its first one escaped
        "distOp.a.noop.state.7.state",
        "distOp.a.runOps.7.state",
        "distOp.a.noop.1.000001.arg",
        "distOp.a.noop.1.1.state",
        "distOp.a.noop.1.0000001.state",
        "distOp.a.noop.1.plan.1",
        "distOp.a.noop.1",
        "distOp.a.noop",
        "distOp..noop.1.state",
        "distOp.a.no%2Dop.1.state",
        "distOp.a%.noop.1.state",
        "distOp.%FF.noop.1.state",
        "distOpClaim.a.noop.1",
        "distOpOpen.a.noop.1.state",
        "distOpNode.a.b",
        "distOpWatermark.1.old",
        "distOpWatermark.1.young.x",
        "distOpWhat.a",
        "prod/distOp.a.noop.1.state",
        "",
    ],
)
def test_components_that_are_not_canonical_are_refused(key: str) -> None:
    with pytest.raises(InvalidArgument):
        Keys().parse(key)


@pytest.mark.parametrize("number", [0, 7, 123_456, 999_999])
def test_the_ordinal_of_a_job_is_read_from_each_of_its_keys(number: int) -> None:
    keys, ref = Keys(), OperationRef("a", "noop", "", 1)
    assert K.claim_ordinal(keys.claim(ref, number)) == number
    assert K.state_ordinal(keys.job(ref, number, "state")) == number
    assert K.state_ordinal(keys.job(ref, number, "outcome")) is None
    assert K.job_name(keys.job(ref, number, "outcome")) == (number, "outcome")


def test_invalid_names_are_refused() -> None:
    for bad in ("", "\ud800", "a\udfff", "x" * 256, "é" * 43, "." * 86):
        with pytest.raises(InvalidArgument):
            K.encode(bad)
        with pytest.raises(InvalidArgument):
            K.encode_object(bad)
    assert K.encode("x" * 255) == "x" * 255
    with pytest.raises(InvalidArgument):
        K.encode_object("7" * 255)  # its first digit is escaped, which makes it longer
    for bad in ("", "7up", "a.b", "a b", "été", "runOps", "state", "plan", "x" * 256, "a\n"):
        with pytest.raises(InvalidArgument):
            K.check_type_name(bad)
    for bad in ("a/b", "a.b", " ", "é", "a\n"):
        with pytest.raises(InvalidArgument):
            Keys(bad)
    ref = OperationRef("a", "noop", "", 1)
    for bad_ordinal in (-1, 1_000_000):
        with pytest.raises(InvalidArgument):
            Keys().claim(ref, bad_ordinal)
    for bad_text in ("1", "0000001", "00000a", "٠٠٠٠٠٠", "-00001", "+00001"):
        with pytest.raises(InvalidArgument):
            K.parse_ordinal(bad_text)


def test_keys_are_spelled_as_in_the_contract() -> None:
    keys, ref = Keys(), OperationRef("sales.orders", "build-index", "7", 3)
    assert keys.root(ref) == "distOp.sales%2Eorders.build-index.%37.3"
    assert keys.of(ref, "state") == "distOp.sales%2Eorders.build-index.%37.3.state"
    assert keys.job(ref, 12, "outcome") == "distOp.sales%2Eorders.build-index.%37.3.000012.outcome"
    assert keys.gate(ref) == "distOpOpen.sales%2Eorders.build-index.%37.3"
    assert keys.pending(ref) == "distOpPending.sales%2Eorders.build-index.%37.3"
    assert keys.claim(ref, 12) == "distOpClaim.sales%2Eorders.build-index.%37.3.000012"
    assert keys.history(ref) == "distOpHistory.sales%2Eorders.build-index.%37.3"
    assert keys.run_ops("@cluster") == "distOp.@cluster.runOps"
    assert keys.coordinator("a", "noop") == "distOpCoordinator.a.noop"
    assert Keys("prod").table("a") == "prod/distOpTable.a"
