"""Operation types of the tests, installed only for the daemons that a test starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ENTRY_POINTS = """\
[distop.behaviors]
sample = tests.support.sample_behaviors:Sample
batches = tests.support.sample_behaviors:Batches
large = tests.integration.large_behavior:Large
staging = tests.integration.staging_behavior:Staging
kept-staging = tests.integration.staging_behavior:KeptStaging
refusing = tests.integration.large_behavior:Refusing
restarting = tests.support.step_behavior:Restarting
rough = tests.support.failing_jobs:Rough
traced = tests.support.traced_behavior:Traced
held-index = tests.faults.held_index:HeldBuild
held-drop = tests.faults.held_index:HeldDrop
clean-up = tests.support.operation_id_behaviors:CleanUp
purge-path = tests.support.operation_id_behaviors:PurgePath
steps = tests.support.step_behavior:Steps
writing = tests.support.writing:Writing
sparkwriting = tests.support.writing:SparkWriting
faulty-apply = tests.faults.faulty_apply:FaultyApply
faulty-validate = tests.faults.faulty_validate:FaultyValidate
faulty-compact = tests.faults.faulty_maintenance:FaultyCompact
faulty-expire-snapshots = tests.faults.faulty_maintenance:FaultyExpireSnapshots
faulty-expire-partitions = tests.faults.faulty_maintenance:FaultyExpirePartitions
faulty-remove-orphans = tests.faults.faulty_maintenance:FaultyRemoveOrphans
faulty-restore = tests.faults.faulty_maintenance:FaultyRestore
faulty-export = tests.faults.faulty_maintenance:FaultyExport
absent = tests.support.no_such_module:Absent
"""


def python_path(*folders: Path | str) -> dict[str, str]:
    """The environment of a process that imports from these folders first, then from those of its parent."""
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *([inherited] if inherited else [])])}


def install(site: Path, name: str, entry_points: str) -> None:
    """Install a package with these entry points into ``site``, for processes that import from there."""
    info = site / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture(scope="session")
def sample_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with the types of ENTRY_POINTS; ``absent`` is installed but cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "distop-samples", ENTRY_POINTS)
    return python_path(folder, ROOT)
