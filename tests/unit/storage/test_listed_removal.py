"""The removal of listed objects of a bucket, some of which the store refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError

from distop.storage import listed_removal
from distop.storage.object_store import LARGEST, Listed
from distop.storage.opened_stores import memory_store
from distop.storage.store_errors import Denied, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.storage.object_store import ObjectStore, StoredObject


@pytest.fixture
def store() -> ObjectStore:
    found = memory_store()
    for n in range(5):
        found.put_new(f"a/{n}", b"content")
    return found


def listed(store: ObjectStore) -> list[Listed]:
    return [Listed(one.key, one.size, one.stamp) for one in store.list("a")]


def keys(store: ObjectStore) -> list[str]:
    return [one.key for one in store.list()]


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, refused: str) -> None:
    """Let a function of obstore refuse calls that name this object."""
    real = getattr(obstore, name)

    def refusing(of: Any, paths: str | Sequence[str], *others: Any, **options: Any) -> Any:
        if refused in ([paths] if isinstance(paths, str) else paths):
            raise PermissionDeniedError("refused")
        return real(of, paths, *others, **options)

    monkeypatch.setattr(obstore, name, refusing)


def test_a_denied_object_is_a_failure_and_the_others_are_removed(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = listed(store)
    refuse(monkeypatch, "delete", "a/2")
    found = store.remove_listed([*wanted, Listed("a/none", 1, "x")])
    assert (list(found.removed), list(found.missing)) == (["a/0", "a/1", "a/3", "a/4"], ["a/none"])
    assert list(found.failed) == ["a/2"]
    assert keys(store) == ["a/2"]


def test_an_object_that_cannot_be_examined_stays(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, head = listed(store), type(store).head

    def refusing(own: ObjectStore, key: str) -> StoredObject:
        if key == "a/2":
            raise Denied("refused")
        return head(own, key)

    monkeypatch.setattr(type(store), "head", refusing)
    found = store.remove_listed(wanted)
    assert (len(found.removed), found.failed) == (4, {"a/2": "refused"})
    assert keys(store) == ["a/2"]


def test_an_object_that_cannot_be_copied_stays(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = listed(store)
    refuse(monkeypatch, "copy", "a/2")
    found = store.move_listed({one: f"q/{one.key}" for one in wanted})
    assert (len(found.removed), list(found.failed)) == (4, ["a/2"])
    assert keys(store) == ["a/2", "q/a/0", "q/a/1", "q/a/3", "q/a/4"]


def test_an_object_that_cannot_be_removed_after_its_copy_is_a_failure(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = listed(store)
    refuse(monkeypatch, "delete", "a/2")
    found = store.move_listed({one: f"q/{one.key}" for one in wanted})
    assert (len(found.removed), list(found.failed)) == (4, ["a/2"])
    assert {"a/2", "q/a/2"} <= set(keys(store))


def test_an_object_that_one_copy_cannot_hold_stays(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed_removal, "LARGEST", 6)
    assert LARGEST > 6
    found = store.move_listed({one: f"q/{one.key}" for one in listed(store)})
    assert (found.removed, len(found.failed)) == ([], 5)
    assert len(keys(store)) == 5


def test_a_busy_store_is_no_failure_of_an_object(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = listed(store)

    def busy(*_: Any) -> None:
        raise StoreUnavailable("later")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "delete_many", busy)
        with pytest.raises(StoreUnavailable):
            store.remove_listed(wanted)
    assert len(store.remove_listed(wanted).removed) == 5


def test_the_name_of_a_new_key_may_be_too_long(store: ObjectStore) -> None:
    found = store.move_listed({one: f"{'q' * 1100}/{one.key}" for one in listed(store)})
    assert (found.removed, len(found.failed)) == ([], 5)
