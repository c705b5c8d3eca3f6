"""Roles of etcd: no role reaches into another table or namespace, whatever their names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.errors import InvalidArgument
from distop.protocol import etcd_roles
from distop.protocol import keys as K
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef
from tests.unit.protocol.test_keys import names, refs, types

tables = st.one_of(st.sampled_from(["a", "ab", "a.b", "a/b", "a%2Eb", "a.validate", "a.", "@cluster", "A"]), names)
namespaces = st.one_of(
    st.sampled_from(["", "prod", "prod2", "a", "distO"]), st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)
).filter(lambda name: not name.startswith(K.OP))


def keys_of(keys: Keys, ref: OperationRef, name: str) -> dict[str, list[str]]:
    """Keys by what a submitter of the table may do with them: ``write``, ``read`` or ``none``.

    ``maintain``: a submitter may read them, and a maintainer also write.
    """
    table, type_name = ref.table, ref.type
    return {
        "write": [
            *(keys.of(ref, part) for part in sorted(K.OPERATION_NAMES)),
            *(keys.job(ref, 7, part) for part in sorted(K.JOB_NAMES)),
            *(keys.run_ops(table), keys.next_instance(table, type_name), keys.current(table, type_name, ref.object)),
            *(keys.chunk(ref, 3), keys.edge(ref, "after", "0" * 20), keys.edge(ref, "next", "0" * 20)),
            *(keys.gate(ref), keys.pending(ref), keys.unique(table, type_name, name)),
            *(keys.request(table, type_name, name), keys.policy_event(table, name)),
        ],
        "maintain": [keys.policy(table, name), keys.policy_state(table, name)],
        "read": [
            *(keys.claim(ref, 7), keys.coordinator(table, type_name), keys.history(ref), keys.history_chunk(ref, 0)),
            *(keys.beside_history(ref, "arg"), keys.table(table), keys.behavior(type_name), keys.node(name)),
        ],
        "none": [
            *(keys.permit(ref, 1), keys.hold(name), keys.drain(name), keys.watermark(1), keys.young_watermark(1)),
            *(keys.policy_evaluator(table), keys.removed_table(ref)),
        ],
    }


SHARED = (K.BEHAVIOR, K.NODE)


@given(namespaces, tables, refs, names)
def test_a_submitter_may_run_all_commands_on_its_table(
    namespace: str, table: str, ref: OperationRef, name: str
) -> None:
    keys = Keys(namespace)
    submitter, maintainer = etcd_roles.submitter(keys, table), etcd_roles.maintainer(keys, table)
    of_table = keys_of(keys, OperationRef(table, ref.type, ref.object, ref.instance), name)
    for kind, found in of_table.items():
        for key in found:
            assert (submitter.may_read(key), submitter.may_write(key)) == (kind != "none", kind == "write"), key
            may = (kind != "none", kind in ("write", "maintain"))
            assert (maintainer.may_read(key), maintainer.may_write(key)) == may, key
    assert not submitter.may_read(keys.policy_mark())
    assert maintainer.may_write(keys.policy_mark())


@given(namespaces, tables, refs, names)
def test_a_submitter_may_not_access_other_tables(namespace: str, table: str, ref: OperationRef, name: str) -> None:
    if ref.table == table:
        return
    keys = Keys(namespace)
    for role in (etcd_roles.submitter(keys, table), etcd_roles.maintainer(keys, table)):
        for found in keys_of(keys, ref, name).values():
            for key in found:
                assert not role.may_write(key), key
                assert not role.may_read(key) or keys.parse(key).family in SHARED, key


@given(namespaces, namespaces, tables, refs, names)
def test_no_role_may_access_another_namespace(
    namespace: str, other: str, table: str, ref: OperationRef, name: str
) -> None:
    if namespace == other:
        return
    theirs = [key for found in keys_of(Keys(other), ref, name).values() for key in found]
    for role in etcd_roles.roles(Keys(namespace), [table, ref.table]):
        assert not any(role.may_read(key) or role.may_write(key) for key in theirs)


@given(namespaces, refs, names)
def test_viewers_may_write_nothing_and_executors_everything(namespace: str, ref: OperationRef, name: str) -> None:
    keys = Keys(namespace)
    viewer, executor = etcd_roles.roles(keys, ())
    for found in keys_of(keys, ref, name).values():
        for key in found:
            assert (viewer.may_read(key), viewer.may_write(key)) == (True, False)
            assert (executor.may_read(key), executor.may_write(key)) == (True, True)


@given(st.lists(st.tuples(namespaces, tables), unique=True, min_size=2, max_size=6))
def test_role_names_are_unique(subjects: list[tuple[str, str]]) -> None:
    found = {(role.name, namespace) for namespace, _ in subjects for role in etcd_roles.roles(Keys(namespace), ())}
    of_tables = [
        role(Keys(namespace), table).name
        for namespace, table in subjects
        for role in (etcd_roles.submitter, etcd_roles.maintainer)
    ]
    assert len(set(of_tables)) == 2 * len(subjects)
    assert len({name for name, _ in found}) == len(found)
    assert not {name for name, _ in found} & set(of_tables)


@given(types)
def test_a_namespace_must_not_begin_like_a_key(rest: str) -> None:
    """Its keys would lie in the range of those without a namespace."""
    for name in ("distOp", f"distOp{rest}"):
        with pytest.raises(InvalidArgument, match="must not begin with distOp"):
            Keys(name)


def test_each_table_has_two_roles() -> None:
    found = etcd_roles.roles(Keys(), ["a.b", "a", "a.b"])
    assert [role.name for role in found] == [
        *("distop.viewer", "distop.executor", "distop.submitter.a%2Eb", "distop.maintainer.a%2Eb"),
        *("distop.submitter.a", "distop.maintainer.a"),
    ]
