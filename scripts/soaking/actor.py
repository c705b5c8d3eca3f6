"""The actor of a soak: a process that claims and returns jobs, and is killed and restarted at times.

It writes a line for the answer to each returned job.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distop import Complete, Release, Retry, connect
from distop.errors import DistopError, InvalidToken

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from distop.blocking import Client
    from distop.services.claims.owned_jobs import OwnedJob, OwnedOutcome

NAME = "act"
BROKEN = "an actor's attempt failed"
DURATION = 4.0
"""Seconds of a claim."""
SLOW = 6.0
"""Maximum seconds of a job: some are returned late."""
AGAIN = 0.3
"""Seconds between two polls."""
MOST = 2
"""Maximum jobs of one claim."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A completed job. ``id``: the id in its result. ``void``: its token was invalid at the first return."""

    op: str
    ordinal: int
    id: str
    void: bool


class Actor:
    """The actor's process, as a context manager. ``types``: the types whose jobs it claims."""

    name = NAME

    def __init__(self, endpoints: Sequence[str], types: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self._words = [",".join(endpoints), ",".join(types)]
        self._env = {**os.environ, **env}
        self.log = folder / f"{NAME}.log"
        self._notes = folder / f"{NAME}.jsonl"
        self._lives = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start or restart the process."""
        self._lives += 1
        words = [sys.executable, str(Path(__file__).resolve()), *self._words, str(self._notes), str(self._lives)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, env=self._env)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end of the process."""
        self._process.kill()
        self._process.wait()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def returned(self) -> list[Returned]:
        """The jobs whose return has a known outcome."""
        if not self._notes.exists():
            return []
        return [Returned(*json.loads(line)) for line in self._notes.read_text().splitlines()]


def act(client: Client, types: Sequence[str], notes: Path, chance: random.Random) -> None:
    """Claim and return jobs as long as the parent process lives."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(AGAIN)
        try:
            jobs = client.own_jobs(NAME, types, MOST, DURATION)
        except DistopError as error:
            print(f"cannot claim jobs: {error}", flush=True)
            continue
        for job in jobs:
            _run(client, job, notes, chance)


def _run(client: Client, job: OwnedJob, notes: Path, chance: random.Random) -> None:
    """Work on a job: some are extended, some are returned late, some never."""
    luck, name = chance.random(), str(uuid.uuid4())
    time.sleep(chance.uniform(0, 0.5) if luck < 0.8 else chance.uniform(0, SLOW))
    if luck < 0.1:
        return
    if luck < 0.4:
        try:
            client.extend([job.token], DURATION)
        except DistopError as error:
            print(f"cannot extend a claim: {error}", flush=True)
    outcome: OwnedOutcome = Complete({"by": name}) if luck < 0.85 else Retry(BROKEN) if luck < 0.9 else Release()
    void = _return_job(client, job, outcome)
    if isinstance(outcome, Complete) and void is not None:
        with notes.open("a") as file:
            file.write(json.dumps([job.op, job.ordinal, name, void]) + "\n")


def _return_job(client: Client, job: OwnedJob, outcome: OwnedOutcome) -> bool | None:
    """Return a job. Returns whether the token was invalid; None: an earlier attempt may have returned it."""
    again = False
    while True:
        try:
            client.return_job(job.token, outcome)
        except InvalidToken:
            return None if again else True
        except DistopError as error:
            print(f"cannot return a job; retrying: {error}", flush=True)
            again = True
            time.sleep(AGAIN)
        else:
            return False


def main(endpoints: str, types: str, notes: str, life: str) -> None:
    """Connect, with retries, and run."""
    while True:
        try:
            client = connect(endpoints)
        except DistopError as error:
            print(f"cannot connect; retrying: {error}", flush=True)
            time.sleep(AGAIN)
        else:
            return act(client, types.split(","), Path(notes), random.Random(f"{types}/{life}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
