"""The maintenance operations with injected faults (``fault_injection``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.tables.delta.delta_partition_removal import DeltaPartitionRemoval
from distop.tables.delta.delta_replacer import DeltaReplacer
from distop.tables.delta.log_publisher import LogPublisher
from distop.tables.iceberg.catalog_publisher import CatalogPublisher
from distop.tables.iceberg.folder_publisher import FolderPublisher
from distop.tables.iceberg.iceberg_partition_removal import IcebergPartitionRemoval
from distop.tables.iceberg.iceberg_replacer import IcebergReplacer
from distop_behaviors.compact import Compact
from distop_behaviors.compact.completion import CompactCompletion
from distop_behaviors.compact.group_rewrite import GroupRewrite
from distop_behaviors.expire import ExpirePartitions, ExpireSnapshots, expire_plan
from distop_behaviors.expire.expire_completion import ExpireCompletion
from distop_behaviors.expire.file_deletion import FileDeletion
from distop_behaviors.export import Export, export_completion
from distop_behaviors.export.export_target import ExportTarget
from distop_behaviors.export.folder_export import FolderExport
from distop_behaviors.orphans import RemoveOrphans, Restore
from distop_behaviors.orphans.orphan_removal import OrphanRemoval
from distop_behaviors.orphans.restoration import Restoration
from tests.faults.fault_injection import inject_around

if TYPE_CHECKING:
    from collections.abc import Callable


class FaultyCompact(Compact):
    """``compact`` with another type name."""

    type_name = "faulty-compact"


class FaultyExpireSnapshots(ExpireSnapshots):
    """``expire-snapshots`` with another type name."""

    type_name = "faulty-expire-snapshots"


class FaultyExpirePartitions(ExpirePartitions):
    """``expire-partitions`` with another type name."""

    type_name = "faulty-expire-partitions"


class FaultyRemoveOrphans(RemoveOrphans):
    """``remove-orphans`` with another type name."""

    type_name = "faulty-remove-orphans"


class FaultyRestore(Restore):
    """``restore`` with another type name."""

    type_name = "faulty-restore"


class FaultyExport(Export):
    """``export`` with another type name."""

    type_name = "faulty-export"


def _table(self: Any, *_: Any) -> str:
    return str(self._table.name)


def _context_table(self: Any, *_: Any) -> str:
    return str((self._ctx if hasattr(self, "_ctx") else self._context).table.name)


STEPS: list[tuple[Any, str, Callable[..., str | None]]] = [
    (GroupRewrite, "rewrite_and_offer", lambda self, *_: self.ctx.table.name),
    (GroupRewrite, "commit_batch", lambda self, *_: self.ctx.table.name),
    (DeltaReplacer, "rewrite", _table),
    (IcebergReplacer, "rewrite", _table),
    (IcebergReplacer, "commit", _table),
    (CompactCompletion, "_commit_offered", _context_table),
    (CompactCompletion, "_sweep", _context_table),
    (LogPublisher, "commit", _table),
    (FolderPublisher, "commit", _table),
    (CatalogPublisher, "commit", _table),
    (expire_plan, "read_units", lambda _, ctx: ctx.table.name),
    (ExpireCompletion, "_candidates", _table),
    (FileDeletion, "delete", _context_table),
    (DeltaPartitionRemoval, "remove", _context_table),
    (IcebergPartitionRemoval, "remove", _context_table),
    (OrphanRemoval, "_remove", _table),
    (Restoration, "_restore", _context_table),
    (FolderExport, "_copy_pages", _table),
    (ExportTarget, "remove_markers", _table),
    (ExportTarget, "mark", _table),
    (export_completion, "complete", lambda _, table, *__: table.name),
]
for _owner, _name, _table_of in STEPS:
    inject_around(_owner, _name, _table_of)
