"""Plans a compaction: which files are rewritten, and which of them together. Pure.

The rules are those of Spark's procedure ``rewrite_data_files``, with two differences. A group is not rewritten if it
would become as many files as it has: otherwise a second run would rewrite the result of the first. And a group becomes
as many files as bring each nearest to the target: between 75 and 150 % of it, so that the next run leaves them alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distop.tables.commits import Candidate
    from distop_behaviors.compact.compact_argument import CompactArgument


@frozen
class RewriteGroup:
    """Files of one partition that are rewritten together. ``number``: of the group in its partition, from 0."""

    partition: str
    number: int
    files: tuple[Candidate, ...]

    @property
    def bytes(self) -> int:
        return sum(one.file[1] for one in self.files)


def groups_of(candidates: Iterable[Candidate], wanted: CompactArgument) -> dict[str, list[RewriteGroup]]:
    """The groups of each partition, in the order of the candidates; a partition without groups has an empty list."""
    partitions: dict[str, list[Candidate]] = {}
    for one in candidates:
        partitions.setdefault(one.partition, []).append(one)
    return {name: list(_groups(name, files, wanted)) for name, files in partitions.items()}


def _groups(partition: str, files: Sequence[Candidate], wanted: CompactArgument) -> Iterator[RewriteGroup]:
    chosen = [one for one in files if _is_unfit(one, wanted)]
    worth = [group for group in _packed(chosen, wanted.group_bytes) if _is_worth(group, wanted)]
    for number, group in enumerate(worth):
        yield RewriteGroup(partition, number, tuple(group))


def _is_unfit(one: Candidate, wanted: CompactArgument) -> bool:
    """Whether a file has another size than wanted, or too many deletes."""
    size = one.file[1]
    low, high = wanted.min_ratio * wanted.target_bytes, wanted.max_ratio * wanted.target_bytes
    return size < low or size > high or _has_deletes(one, wanted)


def _has_deletes(one: Candidate, wanted: CompactArgument) -> bool:
    return wanted.deletes_at_least is not None and one.deletes >= wanted.deletes_at_least


def _packed(files: Sequence[Candidate], most: int) -> Iterator[list[Candidate]]:
    """Consecutive files in groups of at most ``most`` bytes; a larger file is a group of its own."""
    group: list[Candidate] = []
    size = 0
    for one in files:
        if group and size + one.file[1] > most:
            yield group
            group, size = [], 0
        group.append(one)
        size += one.file[1]
    if group:
        yield group


def _is_worth(group: Sequence[Candidate], wanted: CompactArgument) -> bool:
    """Whether a rewrite of these files improves the table."""
    if any(_has_deletes(one, wanted) for one in group):
        return True
    size = sum(one.file[1] for one in group)
    outputs = outputs_of(size, wanted.target_bytes)
    if any(one.file[1] > wanted.max_ratio * wanted.target_bytes for one in group):
        return outputs != len(group)
    enough = len(group) >= wanted.min_input_files or size > wanted.target_bytes
    return enough and len(group) > 1 and outputs < len(group)


def outputs_of(size: int, target: int) -> int:
    """The number of files whose equal sizes are nearest to the target."""
    return max(1, (2 * size + target) // (2 * target))
