"""The executor daemon: waits for etcd, runs one incarnation after another, stops on SIGTERM or SIGINT.

It retries without end: if etcd is unreachable, a session is lost or an unexpected error occurs, it logs that and
retries with back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import re
import signal
import socket
import sys
from typing import TYPE_CHECKING

from distop.clock import time, uuid
from distop.daemon.cluster_binding import Binding, BindingFile
from distop.daemon.incarnation import DaemonSetup, Incarnation
from distop.daemon.meter import NO_METER
from distop.errors import (
    ClusterChanged,
    DistopError,
    EtcdUnavailable,
    InvalidArgument,
    NotAllowed,
    PermissionDenied,
    SessionLost,
    UnsafePath,
    UsageError,
)
from distop.protocol import keys as K
from distop.protocol.keys import Keys
from distop.runtime import gc_tuning, logs, secret_settings, telemetry_settings
from distop.runtime.backoff import Backoff
from distop.storage.files import open_fixed, write_whole
from distop.storage.folder_ownership import make_own
from distop.store import tls_files
from distop.store.client import EtcdClient
from distop.store.cluster_identity import ensure_space_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from distop.daemon.meter import Meter
    from distop.daemon.metrics import Metrics
    from distop.daemon.operation_traces import OperationTraces
    from distop.runtime.telemetry import Telemetry
    from distop.settings import ExecutorConfig

    FindSpace = Callable[[EtcdClient, Keys], Awaitable[str]]

LOCK = "lock"
"""The lock file in a work directory."""
LOCK_LOOK = 5.0
"""Seconds between two checks whether the locked file is still the one in the work directory."""
PAUSE = (0.5, 15.0)
"""Seconds of back-off between incarnations, first and longest."""
LONG_LIFE = 60.0
"""Seconds after which an incarnation resets the back-off."""


def check_system(platform: str = sys.platform) -> None:
    """Raises UsageError unless the system can kill a child in time, with CLOCK_BOOTTIME, /proc, prctl and pidfds."""
    if platform != "linux":
        raise UsageError(f"an executor needs Linux, but this is {platform}, where jobs cannot be killed in time")


def make_work_dir(work_dir: Path) -> None:
    """Create a work directory if it is missing.

    Raises InvalidArgument if it cannot be created, or if other users can change it
    (:mod:`distop.storage.folder_ownership`).
    """
    try:
        make_own(work_dir, "--work-dir")
    except (OSError, UnsafePath) as error:
        raise _unusable(work_dir, error) from None


@contextlib.contextmanager
def locked(work_dir: Path) -> Iterator[os.stat_result]:
    """Lock a work directory; yields the lock file's stat, which identifies it.

    Raises NotAllowed while another daemon has the lock, InvalidArgument if the directory cannot be written, or if other
    users can change it.
    """
    make_work_dir(work_dir)
    try:
        lock = open_fixed(work_dir / LOCK, os.O_RDWR | os.O_CREAT)
    except (OSError, UnsafePath) as error:
        raise _unusable(work_dir, error) from None
    with os.fdopen(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise NotAllowed(
                f"the work directory {work_dir} is in use by a running executor: give another --work-dir"
            ) from None
        yield os.fstat(lock)


def _unusable(work_dir: Path, error: OSError | UnsafePath) -> InvalidArgument:
    why = error.strerror or error if isinstance(error, OSError) else error
    return InvalidArgument(f"cannot use the work directory {work_dir}: {why}")


def stable_id(work_dir: Path, wanted: str | None) -> str:
    """The executor's id: ``wanted``, else the id saved in the work directory, else a new id, which is saved there.

    Raises InvalidArgument if it cannot be read or written.
    """
    if wanted:
        return wanted
    file = work_dir / "executor-id"
    try:
        with contextlib.suppress(FileNotFoundError), os.fdopen(open_fixed(file, os.O_RDONLY)) as opened:
            kept = opened.read().strip()
            if kept:
                return kept
        return _new_id(file)
    except OSError as error:
        raise _unusable(work_dir, error) from None


def _new_id(file: Path) -> str:
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname())[:40] or "executor"
    new = f"{host}-{uuid.uuid4().hex[:4]}"
    write_whole(file, f"{new}\n".encode())
    return new


def ending_signals() -> list[signal.Signals]:
    """The signals that stop a daemon gracefully: SIGTERM, SIGINT, and SIGHUP unless it is ignored (``nohup``)."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else [])]


async def run_executor(config: ExecutorConfig) -> int:
    """Run an executor daemon until a signal of :func:`ending_signals`; returns its exit code (0).

    Raises UsageError or NotAllowed if it cannot start (wrong system, unusable work directory or certificates), and
    ClusterChanged if etcd is not the cluster that the work directory belongs to, or was restored from an older
    snapshot: at every start, until the work directory is moved away.
    """
    check_system()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in ending_signals():
        loop.add_signal_handler(signum, stop.set)
    tls_files.read(config.etcd)  # fails now if they are invalid; a running daemon may see files that are being replaced
    secret_settings.hide([config.etcd.password or ""])
    secret_settings.hide_settings(config.spark_conf)
    secret_settings.hide_variables(os.environ, config.spark_conf.get(secret_settings.PATTERN_SETTING, ""))
    with locked(config.work_dir) as lock:
        executor_id = stable_id(config.work_dir, config.executor_id)
        log = logs.get("distop.executor")
        log.info("executor %s, work directory %s; %s", executor_id, config.work_dir, config.source)
        binding = Binding.load(BindingFile(config.work_dir), config.namespace)
        gc_tuning.freeze_loaded(collect=False)
        about = {"distop.executor": executor_id, "distop.namespace": config.namespace}
        telemetry = telemetry_settings.start("distop-executor", about, config.telemetry, os.environ, log)
        metrics = _metrics(config, executor_id, log)
        meter, traces = _exported(telemetry, metrics, executor_id)
        checking = asyncio.ensure_future(_check_lock(config.work_dir, lock, stop, log))
        try:
            daemon = DaemonSetup(config, executor_id, log, meter=meter, traces=traces)
            await serve(daemon, stop, binding, ensure_space_id)
        finally:
            checking.cancel()
            if metrics is not None:
                await asyncio.to_thread(metrics.close)
            if traces is not None:
                traces.stop_naming()
            if telemetry is not None:
                await asyncio.to_thread(telemetry.close)
    return 0


async def _check_lock(work_dir: Path, lock: os.stat_result, stop: asyncio.Event, log: logs.ContextLogger) -> None:
    """Stop the daemon if its work directory was removed and created again: another daemon may lock the new one."""
    while not stop.is_set():
        await asyncio.sleep(LOCK_LOOK)
        with contextlib.suppress(OSError):
            if not os.path.samestat(lock, await asyncio.to_thread((work_dir / LOCK).stat)):
                log.error("stopping: the work directory %s was replaced while this executor used it", work_dir)
                stop.set()


def _metrics(config: ExecutorConfig, executor_id: str, log: logs.ContextLogger) -> Metrics | None:
    """Start serving metrics if they are configured. Raises InvalidArgument."""
    if config.metrics is None:
        return None
    from distop.daemon.metrics import Metrics

    metrics = Metrics(executor_id)
    host, port = config.metrics[0], metrics.serve(*config.metrics)
    log.info("Serving metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, port)
    return metrics


def _exported(
    telemetry: Telemetry | None, metrics: Metrics | None, executor_id: str
) -> tuple[Meter, OperationTraces | None]:
    """The meter and the traces of the daemon, in what is exported."""
    traces = None
    if telemetry is not None and telemetry.traces:
        from distop.daemon.operation_traces import OperationTraces

        traces = OperationTraces(telemetry, executor_id)
        traces.name_traces_in_logs()
    if telemetry is None or telemetry.meter is None:
        return metrics if metrics is not None else NO_METER, traces
    from distop.daemon.counting_meter import CountingMeter
    from distop.daemon.otel_metrics import OtelRecorder

    counting = metrics if metrics is not None else CountingMeter(executor_id)
    OtelRecorder(telemetry.meter, counting)
    return counting, traces


async def serve(
    daemon: DaemonSetup, stop: asyncio.Event, binding: Binding, find_space: FindSpace | None = None
) -> None:
    """Run one incarnation after another until ``stop`` is set.

    ``find_space`` returns the namespace's id; None if no shared directory is used. Raises ClusterChanged.
    """
    ended = asyncio.Event()
    keeping = asyncio.ensure_future(binding.keep(ended))
    try:
        run_once = functools.partial(_run_once, daemon, stop, binding, find_space)
        await _run_repeatedly(run_once, stop, daemon.log, binding)
    finally:
        ended.set()
        await keeping


async def _run_repeatedly(
    run_once: Callable[[], Awaitable[None]], stop: asyncio.Event, log: logs.ContextLogger, binding: Binding
) -> None:
    backoff = Backoff(*PAUSE)
    while not stop.is_set():
        started = time.monotonic()
        try:
            await run_once()
        except SessionLost as error:
            binding.identity.check()
            log.error("Session lost, its jobs were stopped; starting a new session: %s", error)
        except ClusterChanged:
            raise  # the known state of etcd is no longer valid: a person must decide (F18)
        except (EtcdUnavailable, PermissionDenied) as error:
            log.warning("Waiting for etcd: %s", error)
        except DistopError as error:
            log.error("The daemon failed; restarting with back-off: %s", error)
        except Exception as error:
            log.error("Unexpected error in the daemon; restarting with back-off", exc_info=error)
        if stop.is_set():
            break
        if time.monotonic() - started > LONG_LIFE:
            backoff.reset()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff.pause()):
                await stop.wait()


async def _bind(binding: Binding, work_dir: Path) -> None:
    """Save the binding. Raises InvalidArgument if it cannot be written, since the directory would not be bound."""
    try:
        await binding.save()
    except OSError as error:
        raise _unusable(work_dir, error) from None


async def _run_once(daemon: DaemonSetup, stop: asyncio.Event, binding: Binding, find_space: FindSpace | None) -> None:
    keys, client = Keys(daemon.config.namespace), EtcdClient(daemon.config.etcd, binding.identity)
    if daemon.meter is not NO_METER:
        client.on_commit = daemon.meter.committed
    try:
        connecting = asyncio.ensure_future(client.connect())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not connecting.done():
            connecting.cancel()
            return
        connecting.result()
        await client.check_server()
        # A linearizable read: it confirms that this is the known cluster, before anything is written to it or compared
        # with files on the disk.
        await client.count(*keys.family(K.NODE))
        await _bind(binding, daemon.config.work_dir)
        space = await find_space(client, keys) if find_space is not None else ""
        await Incarnation(daemon, client, space).run(stop)
    finally:
        daemon.meter.end()
        await client.close()
