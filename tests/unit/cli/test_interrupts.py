"""An interrupt ends the event loop's work, even if another thread receives the signal."""

from __future__ import annotations

import subprocess
import sys

SLEEPS = """
import asyncio, signal, threading
from distop.cli.interrupts import run

async def sleep():
    # The loop normally sleeps by then. Otherwise it need not be woken, and the test passes.
    threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)).start()
    await asyncio.sleep(600)

try:
    run(sleep())
except KeyboardInterrupt:
    print("interrupted")
"""

ENDS = """
import asyncio, signal, threading
from distop.cli.interrupts import run

async def answer():
    return 42

assert run(answer()) == 42
assert signal.set_wakeup_fd(-1) == -1
found = []
thread = threading.Thread(target=lambda: found.append(run(answer())))
thread.start()
thread.join()
assert found == [42]
"""


def test_an_interrupt_that_another_thread_received_wakes_the_loop() -> None:
    done = subprocess.run([sys.executable, "-c", SLEEPS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "interrupted\n"


def test_the_loop_restores_the_wakeup_descriptor_and_runs_in_other_threads() -> None:
    subprocess.run([sys.executable, "-c", ENDS], check=True, timeout=60)


INTERRUPTED_IMPORT = """
import sys
from distop.cli.main import main

class Interrupt:
    def find_spec(self, name, *_):
        if name == "distop.cli.commands":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv = ["distop", "ls"]
main()
"""


def test_an_interrupt_during_the_import_of_the_commands_prints_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


TABLE_WITH_CLOSED_STDOUT = """
import sys
from distop.cli import output

assert sys.stdout is None
output.table(["NAME"], [["a"]], "none")
"""


def test_a_table_is_dropped_if_stdout_is_closed() -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, TABLE_WITH_CLOSED_STDOUT]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
