"""Staged output on real daemons: stages of killed executors are removed, and those of users kept with the record."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.integration.conftest import TABLE
from tests.integration.staging_behavior import JOBS
from tests.integration.test_history import advance_an_hour, record, write_now
from tests.support.behaviors import sample_env

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemons

__all__ = ["sample_env"]

pytestmark = pytest.mark.etcd


@pytest.mark.parametrize("kind", ["staging", "kept-staging"])
def test_F28_F35_stages_of_a_killed_executor_are_removed(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path, kind: str
) -> None:
    """Stages of types of other authors, too. Those that outcomes name stay only if users read them."""
    shared = tmp_path / "shared"
    options = ("--shared-dir", str(shared), "--slots", str(JOBS))

    def staged() -> list[Path]:
        while True:
            try:
                return sorted(shared.glob(f"*/stage/{TABLE}/{kind}/*/*/*/lines.txt"))
            except FileNotFoundError:
                continue  # a folder was removed while it was listed

    (bob,) = group.start("bob", ttl=3, env=sample_env, options=options)
    op = group.client.start_operation(kind, TABLE, {"go": str(tmp_path / "go")})
    group.eventually(lambda: len(staged()) == JOBS, "each job has written its file", "bob")
    former = staged()
    (ann,) = group.start("ann", ttl=3, env=sample_env, options=options)
    bob.kill()
    group.eventually(lambda: len(staged()) == 2 * JOBS, "lost jobs have written their files again", "ann")
    (tmp_path / "go").touch()
    done = op.wait(60)
    assert (done.state, done.report) == ("success", {"lines": 2 * JOBS}), group.tails()
    if kind == "staging":
        group.eventually(lambda: not staged(), "all stages are removed", "ann")
        group.eventually(lambda: "Removed 6 stages with" in group.tails("ann"), "the removal is logged", "ann")
        return
    group.eventually(lambda: len(staged()) == JOBS, "stages of dead attempts are removed", "ann")
    assert len({path.parents[1] for path in staged()}) == JOBS, "one of each job"
    assert not set(staged()) & set(former)
    assert ann.stop() == 0
    kept = staged()
    (space,) = shared.iterdir()
    for instance in ("90", "95"):
        late = space / "stage" / TABLE / kind / instance / "000000" / "7-inc" / "lines.txt"
        late.parent.mkdir(parents=True)
        late.write_text("written by a killed process\n")
    write_now(group, record(f"{TABLE}/{kind}/90", time.time() - 5 * 3600))
    advance_an_hour(group)
    group.start("cy", ttl=3, env=sample_env, options=("--shared-dir", str(shared), "--history-age", "4h"))
    group.eventually(lambda: staged() == sorted([*kept, late]), "the stages of the removed record are removed", "cy")
