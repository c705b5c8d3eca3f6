"""No-op workflows and activities on Temporal's development server. Prints their rates as JSON.

Run by an environment with the package temporalio; the program temporal is on its PATH. The server keeps its data in
memory, so a workflow is not durable here.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

QUEUE = "bench"
CALLERS = 64
READY_SECONDS = 60


@activity.defn
async def noop() -> None:
    """The job."""


@workflow.defn
class Jobs:
    """Runs a number of activities at the same time."""

    @workflow.run
    async def run(self, count: int) -> None:
        wait = timedelta(seconds=60)
        await asyncio.gather(*(workflow.execute_activity(noop, start_to_close_timeout=wait) for _ in range(count)))


def worker(client: Client) -> Worker:
    """A worker with more room than its defaults."""
    return Worker(
        client,
        task_queue=QUEUE,
        workflows=[Jobs],
        activities=[noop],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_concurrent_activities=200,
        max_concurrent_workflow_tasks=200,
    )


async def connected(address: str) -> Client:
    """A client, once the server answers."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            return await Client.connect(address)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


async def serve(address: str) -> None:
    """A worker's process."""
    await worker(await connected(address)).run()


async def measure(address: str, jobs: int, clients: int) -> dict[str, float]:
    """Workflows of one activity each, and activities of workflows with 500 each, a second."""
    some = [await connected(address) for _ in range(clients)]
    await some[0].execute_workflow(Jobs.run, 1, id="first", task_queue=QUEUE)
    left = iter(range(jobs))

    async def caller(client: Client) -> None:
        for n in left:
            await client.execute_workflow(Jobs.run, 1, id=f"one-{n}", task_queue=QUEUE)

    began = time.perf_counter()
    await asyncio.gather(*(caller(client) for client in some for _ in range(CALLERS)))
    single = jobs / (time.perf_counter() - began)
    # A workflow's history is limited: more activities belong to several workflows.
    share = min(500, jobs)
    began = time.perf_counter()
    whole = [some[0].execute_workflow(Jobs.run, share, id=f"many-{n}", task_queue=QUEUE) for n in range(jobs // share)]
    await asyncio.gather(*whole)
    split = jobs // share * share / (time.perf_counter() - began)
    return {"workflows with one no-op activity": single, "no-op activities of one workflow of 500": split}


def main() -> None:
    """Start the server and the workers, and measure."""
    if sys.argv[1] == "worker":
        asyncio.run(serve(sys.argv[2]))
        return
    options = json.loads(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["temporal", "server", "start-dev", "--headless", "--port", str(port), "--log-level", "error"]
    started = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
    try:
        address = f"127.0.0.1:{port}"
        for _ in range(options["processes"]):
            own = [sys.executable, __file__, "worker", address]
            started.append(subprocess.Popen(own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        print(json.dumps(asyncio.run(measure(address, options["jobs"], options["clients"]))))
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


if __name__ == "__main__":
    main()
