"""A process with a client may start others, as Spark does with its JVM."""

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

STARTS_OTHERS = """
import subprocess, sys, threading
import distop

client = distop.connect(sys.argv[1])
over = threading.Event()

def work():
    while not over.is_set():
        client.operations()

busy = [threading.Thread(target=work) for _ in range(3)]
for thread in busy:
    thread.start()
# With a function to call first it is forked, as PySpark forks its JVM.
started = [subprocess.Popen(["true"], preexec_fn=lambda: None) for _ in range(150)]
codes = {one.wait(60) for one in started}
over.set()
for thread in busy:
    thread.join()
print(codes, client.operations())
"""


def test_processes_that_are_started_beside_a_client_live(shared_etcd: EmbeddedEtcd) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    words = [sys.executable, "-c", STARTS_OTHERS, shared_etcd.endpoint]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "{0} []\n"
