"""The demo of the README: flight data, etcd, Spark, and two executor daemons, one of which is killed.

The demo prints each command that it runs, so all steps can be repeated by hand. It keeps only the table's files in
``.demo/``, which makes the next run faster.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import distop  # noqa: E402
from distop.protocol.keys import Keys  # noqa: E402
from tests.support.tables import FLIGHTS_DAYS, lay_out_flights  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distop.protocol.records import OperationRef

TABLE = "nyc.flights"
TTL = 4
_REPEAT = 5
"""Seconds after which an unchanged line is printed again."""
CHECKS = {
    "checks": [
        {"not_null": "tailnum"},
        {"not_null": "carrier"},
        {"range": {"column": "distance", "min": 0, "max": 6000}},
        {"check": "dep_delay IS NULL OR dep_delay > -120", "name": "sane_delay"},
    ]
}
FULL_SCAN = {
    "checks": [{"matches": {"column": "dest", "pattern": "^[A-Z]{3}$"}}, {"not_null": "origin"}],
    "statistics": "never",
}


def say(text: str) -> None:
    """Print a headline."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}── {text}{plain}", flush=True)


def command(name: str) -> str:
    """The path of a program of this environment."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def announce(*words: str) -> None:
    """Print a command line in shell syntax."""
    print(f"$ {shlex.join(words)}", flush=True)


def run(*words: str, env: dict[str, str]) -> int:
    """Print a command line and run it. Returns the exit code."""
    announce(*words)
    return subprocess.run([command(words[0]), *words[1:]], env=env, check=False).returncode


def run_watched(client: distop.Client, *words: str, env: dict[str, str]) -> int:
    """Run a command that waits for an operation.

    On a terminal the command draws a progress bar; elsewhere this prints a line for each change of the progress.
    """
    if sys.stderr.isatty():
        return run(*words, env=env)
    announce(*words)
    with subprocess.Popen([command(words[0]), *words[1:]], env=env) as waiting:
        printed, unchanged = "", 0
        while True:
            try:
                return waiting.wait(1.0)
            except subprocess.TimeoutExpired:
                for seen in client.operations(TABLE):
                    total = seen.jobs["total"]
                    done = (seen.jobs["success"] or 0) + (seen.jobs["failed"] or 0)
                    progress = f"{done}/{total} partitions" if total is not None else "no plan yet"
                    more = f", waits for {seen.waiting_for}" if seen.waiting_for else ""
                    line = f"  {seen.op}: {progress}, {seen.jobs['running']} running{more}"
                    unchanged = unchanged + 1 if line == printed else 0
                    if unchanged % _REPEAT == 0:
                        print(line, flush=True)
                    printed = line


def table_folder(folder: Path) -> Path:
    """The folder of the flights table, written once to a scratch folder and renamed, so that it is never incomplete."""
    target = folder / "flights"
    if not target.exists():
        say(f"Write the 336,776 flights of 2013 as {FLIGHTS_DAYS} daily partitions")
        folder.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder))
        try:
            lay_out_flights(scratch / "flights").rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def executor(name: str, folder: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start one executor daemon; its log goes to a file."""
    log = (folder / f"{name}.log").open("wb")
    words = [command("distop"), "executor", "--id", name, "--work-dir", str(folder / name), "--ttl", str(TTL)]
    print(f"$ {shlex.join(['distop', 'executor', '--id', name, '--ttl', str(TTL)])} &", flush=True)
    return subprocess.Popen(words, env=env, stdout=log, stderr=log)


def wait_for(condition: Callable[[], object], what: str, log: Path, seconds: float = 60.0) -> None:
    """Poll until ``condition`` is true. After the time limit, end the demo with the end of the log."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.02)
    sys.exit(f"demo: {what} did not happen within {seconds:.0f} s; the end of {log.name}:\n{log.read_text()[-3000:]}")


def read_keys(env: dict[str, str], prefix: str, *options: str) -> Iterator[tuple[str, str, int]]:
    """(key, value, revision of the last write) of all keys with a prefix, read with etcdctl."""
    words = [command("etcdctl"), "--endpoints", env["DISTOP_ETCD"], "get", "--prefix", prefix, *options]
    answer = subprocess.run([*words, "--write-out=json"], env=env, capture_output=True, text=True, check=True).stdout
    for kv in json.loads(answer).get("kvs", []):
        key, value = (base64.b64decode(kv.get(part, "")).decode() for part in ("key", "value"))
        yield key, value, kv["mod_revision"]


def holders(env: dict[str, str]) -> set[str]:
    """The executors that hold claims now."""
    claims = [json.loads(value) for _, value, _ in read_keys(env, "distOpClaim.")]
    return {claim["executor"] for claim in claims if "incarnation" in claim}


def shares(env: dict[str, str], ref: OperationRef) -> Counter[str]:
    """Executor → the number of partitions that it ended, for an ended operation.

    etcd still has the outcomes at the revision before that of the history record, which deleted them.
    """
    record, root = Keys().history(ref), Keys().root(ref)
    finished = next(revision for key, _, revision in read_keys(env, record) if key == record)
    before = read_keys(env, f"{root}.", f"--rev={finished - 1}")
    return Counter(json.loads(value)["executor"] for key, value, _ in before if key.endswith(".outcome"))


def main() -> int:
    """Run the demo; returns 0 if all results are as expected."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="keep the executors' logs and work directories")
    options = parser.parse_args()
    began = time.monotonic()
    location = table_folder(ROOT / ".demo")
    folder = Path(tempfile.mkdtemp(prefix="distop-demo-"))
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    done = False
    try:
        say("A private etcd and two executor daemons, each with its own Spark")
        with distop.EmbeddedEtcd() as etcd:
            env = {**os.environ, "DISTOP_ETCD": etcd.endpoint, "ETCDCTL_API": "3"}
            print(f"$ export DISTOP_ETCD={etcd.endpoint}", flush=True)
            for name in ("ann", "bob"):
                daemons[name] = executor(name, folder, env)
            try:
                done = show(etcd.endpoint, env, location, folder, daemons)
            finally:
                for daemon in daemons.values():
                    if daemon.poll() is None:
                        daemon.send_signal(signal.SIGTERM)
                for daemon in daemons.values():
                    daemon.wait(timeout=30)
    finally:
        if options.keep or not done:
            print(f"The logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    say(f"Done in {time.monotonic() - began:.0f} s")
    return 0 if done else 1


def show(
    endpoint: str, env: dict[str, str], location: Path, folder: Path, daemons: dict[str, subprocess.Popen[bytes]]
) -> bool:
    """Run all steps of the demo; returns whether all results are as expected."""
    client = distop.connect(endpoint)
    wait_for(lambda: len(client.nodes()) == 2, "the start of two executors", folder / "ann.log")
    run("distop", "nodes", env=env)
    near = location.relative_to(Path.cwd()) if location.is_relative_to(Path.cwd()) else location
    run("distop", "table", "add", TABLE, "--format", "parquet", "--location", str(near), env=env)

    say("Validate: is tailnum never NULL? is carrier never NULL? are distances and delays plausible?")
    argument = json.dumps(CHECKS)
    code = run_watched(client, "distop", "start", "validate", TABLE, "--arg", argument, "--wait", env=env)
    report = client.history(TABLE, limit=1)[0].report
    found = {check["name"]: check for check in report["checks"]}
    expected = report["verdict"] == "violated" and code == 1
    nulls = next(c for c in report["checks"] if c["check"] == {"not_null": "tailnum"})
    carrier = next(c for c in report["checks"] if c["check"] == {"not_null": "carrier"})
    expected = expected and nulls["violations"] == 2512 and nulls["exact"] and carrier["verdict"] == "valid"
    violated = [name for name, check in found.items() if check["verdict"] == "violated"]
    print(f"(exit code {code}: the operation failed, because these checks are violated: {', '.join(violated)})")

    say("A second operation scans all rows; one executor is killed while it holds half of the partitions")
    announce("distop", "start", "validate", TABLE, "--arg", json.dumps(FULL_SCAN))
    operation = client.start_operation("validate", TABLE, FULL_SCAN)
    wait_for(lambda: "bob" in holders(env), "a claim by bob", folder / "bob.log")
    print("$ kill -9 bob", flush=True)
    daemons["bob"].kill()
    daemons["bob"].wait()
    say("Some of the keys, read with etcdctl")
    keys(env)
    run_watched(client, "distop", "watch", operation.ref, env=env)
    result = operation.wait(timeout=60)
    ended = shares(env, operation.parts)
    expected = expected and result.state == "success" and result.jobs["success"] == ended.total() == FLIGHTS_DAYS
    done = f"{result.jobs['success']} of {FLIGHTS_DAYS} partitions"
    by = ", ".join(f"{ended[name]} by {name}" for name in sorted(ended))
    print(f"{operation.ref} ended as {result.state}: {done}; {by}; bob was killed meanwhile")

    say("The history")
    run("distop", "history", TABLE, env=env)
    client.close()
    if not expected:
        print("demo: a result is not as expected; see above", file=sys.stderr)
    return expected


def keys(env: dict[str, str]) -> None:
    """Print one key of each family with its value, and the number of the others."""
    announce("etcdctl", "get", "--prefix", "distOp")
    families: dict[str, int] = {}
    for key, value, _ in read_keys(env, "distOp"):
        family = ".".join(w for w in key.split(".") if not w.isdigit())
        families[family] = families.get(family, 0) + 1
        if families[family] == 1:
            print(f"  {key}\n      {value if len(value) < 100 else value[:97] + '…'}")
    more = {family: count for family, count in families.items() if count > 1}
    print("  " + ", ".join(f"{count} × {family}" for family, count in more.items()), flush=True)


if __name__ == "__main__":
    # SIGTERM also stops the started processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("\ndemo: interrupted; its daemons and its etcd are stopped", file=sys.stderr)
        raise SystemExit(130) from None
