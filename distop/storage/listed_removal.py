"""Removes or moves objects of a bucket that were listed, if they are unchanged."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from distop.errors import UnsafePath
from distop.storage.object_store import LARGEST, Listed, Removed
from distop.storage.store_errors import BucketMissing, ObjectMissing, StoreError, StoreUnavailable, UnknownWrite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.storage.object_store import ObjectStore, StoredObject

S = TypeVar("S")
T = TypeVar("T")

_AT_ONCE = 8
"""Requests at the same time."""
_LEAST_LISTED = 32
MOST_NEIGHBOURS = 10
"""Maximum number of listed objects for each examined one: a request lists a thousand."""


def remove_unchanged(store: ObjectStore, objects: Sequence[Listed]) -> Removed:
    """:meth:`ObjectStore.remove_listed`."""
    found, missing, changed, failed = _examined(store, objects)
    try:
        store.delete_many(found)
        return Removed(found, missing, changed, failed)
    except StoreUnavailable:
        raise
    except StoreError:
        pass  # which of them was refused is found out one by one

    def remove_one(key: str) -> str:
        try:
            store.delete_many([key])
            return ""
        except StoreUnavailable:
            raise
        except StoreError as error:
            return str(error)

    errors = _at_once(remove_one, found)
    failed |= {key: why for key, why in zip(found, errors, strict=True) if why}
    return Removed([key for key in found if key not in failed], missing, changed, failed)


def move_unchanged(store: ObjectStore, objects: Mapping[Listed, str]) -> Removed:
    """:meth:`ObjectStore.move_listed`."""
    found, missing, changed, failed = _examined(store, list(objects))
    targets = {one.key: target for one, target in objects.items()}
    sizes = {one.key: one.size for one in objects}

    def copy(key: str) -> str:
        if sizes[key] > LARGEST:
            return f"cannot move {store.location_of(key)}: it has over {LARGEST} bytes, more than one copy may have"
        try:
            store.copy_new(key, targets[key])
            return ""
        except StoreUnavailable:
            raise
        except UnknownWrite as error:  # the copy may exist: a later attempt compares it
            raise StoreUnavailable(str(error)) from error
        except (StoreError, UnsafePath) as error:
            return str(error)

    errors = _at_once(copy, found)
    failed |= {key: why for key, why in zip(found, errors, strict=True) if why}
    copied = {key for key in found if key not in failed}
    # A source that was replaced while it was copied stays, and so does its copy.
    again = remove_unchanged(store, [one for one in objects if one.key in copied])
    return Removed(again.removed, [*missing, *again.missing], [*changed, *again.changed], {**failed, **again.failed})


def _examined(
    store: ObjectStore, objects: Sequence[Listed]
) -> tuple[Sequence[str], Sequence[str], Sequence[str], dict[str, str]]:
    """The keys of objects that are unchanged, missing and changed, and of those that cannot be examined."""

    neighbours = _neighbours(store, objects)

    def examine(one: Listed) -> bool | str | None:
        if one.key in neighbours:
            return one.is_same(neighbours[one.key])
        try:
            return one.is_same(store.head(one.key))
        except BucketMissing:
            raise
        except ObjectMissing:
            return None
        except StoreUnavailable:
            raise
        except StoreError as error:
            return str(error)

    answers = _at_once(examine, objects)
    keys = [(one.key, answer) for one, answer in zip(objects, answers, strict=True)]

    def those(wanted: bool | None) -> Sequence[str]:
        return [key for key, answer in keys if answer is wanted]

    failed = {key: answer for key, answer in keys if isinstance(answer, str)}
    return those(True), those(None), those(False), failed


def _neighbours(store: ObjectStore, objects: Sequence[Listed]) -> dict[str, StoredObject]:
    """Those of the objects that a listing shows, if that takes fewer requests than examining each.

    They are neighbours if most objects of a folder are to be removed. An object that is not listed may exist: a wrong
    listing looks empty. Raises StoreUnavailable.
    """
    if len(objects) < _LEAST_LISTED:
        return {}
    keys = {one.key for one in objects}
    first, last = min(keys), max(keys)
    folder = first.rpartition("/")[0]
    while folder and not last.startswith(f"{folder}/"):
        folder = folder.rpartition("/")[0]
    found: dict[str, StoredObject] = {}
    try:
        for n, one in enumerate(store.list(folder, after=first)):
            if one.key > last or n > MOST_NEIGHBOURS * len(keys):
                break
            if one.key in keys:
                found[one.key] = one
    except StoreUnavailable:
        raise
    except (StoreError, UnsafePath):
        pass  # without the right to list, each is examined
    return found


def _at_once(work: Callable[[S], T], some: Sequence[S]) -> Sequence[T]:
    """The results of ``work`` for each, in order, by some threads."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(work, some))
