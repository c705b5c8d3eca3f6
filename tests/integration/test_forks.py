"""A process with a client can start other processes, as Spark starts its JVM."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.etcd import shared_etcd

if TYPE_CHECKING:
    from distop.store.embedded import EmbeddedEtcd

__all__ = ["shared_etcd"]

pytestmark = pytest.mark.etcd

STARTS_PROCESSES = """
import subprocess, sys, threading
import distop

client = distop.connect(sys.argv[1])
done = threading.Event()

def work():
    while not done.is_set():
        client.operations()

busy = [threading.Thread(target=work) for _ in range(3)]
for thread in busy:
    thread.start()
# A preexec_fn makes subprocess fork, as PySpark does for its JVM.
started = [subprocess.Popen(["true"], preexec_fn=lambda: None) for _ in range(150)]
codes = {one.wait(60) for one in started}
done.set()
for thread in busy:
    thread.join()
print(codes, client.operations())
"""


def test_processes_started_by_a_process_with_a_client_succeed(shared_etcd: EmbeddedEtcd) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    words = [sys.executable, "-c", STARTS_PROCESSES, shared_etcd.endpoint]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "{0} []\n"
