"""A consumer of a watch that checks the guarantees every consumer relies on."""

from __future__ import annotations

from distop.protocol.txn import KeyValue
from distop.store.watch_position import Batch


class Mirror:
    """Applies the batches of a watch to a copy of the keys, and checks the guarantees of each batch."""

    def __init__(self) -> None:
        self.content: dict[str, KeyValue] = {}
        self.revision = 0
        self.batches: list[Batch] = []
        self.mod_revisions: list[int] = []

    def apply(self, batch: Batch) -> None:
        assert batch.revision >= self.revision, "the revision decreased"
        self.batches.append(batch)
        if batch.listing:
            self.content = {event.kv.key: event.kv for event in batch.events}
            assert not any(event.deleted for event in batch.events)
        else:
            for event in batch.events:
                assert event.kv.mod_revision > self.revision, "a revision was old or came in two batches"
                self.mod_revisions.append(event.kv.mod_revision)
                if event.deleted:
                    self.content.pop(event.kv.key, None)
                else:
                    self.content[event.kv.key] = event.kv
        self.revision = batch.revision

    @property
    def listings(self) -> int:
        return sum(batch.listing for batch in self.batches)

    @property
    def values(self) -> dict[str, bytes]:
        return {key: pair.value for key, pair in self.content.items()}
