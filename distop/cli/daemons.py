"""Commands that run in the foreground: executor, and dev (a private etcd with one executor)."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from distop.cli.command_context import Context, current
from distop.errors import DistopError, InvalidArgument, describe

SHARED_DIR = Annotated[str | None, typer.Option(metavar="DIR", help="Shared by all executors (<location>/_distop).")]
SLOTS = Annotated[str | None, typer.Option(metavar="N", help="Jobs or batches at a time (the cores).")]
MASTER = Annotated[str | None, typer.Option(metavar="URL", help="Spark's master (local[*]).")]
CONF = Annotated[list[str] | None, typer.Option(metavar="K=V", help="A Spark setting (repeatable).")]
TTL = Annotated[str | None, typer.Option(metavar="S", help="Time to live in seconds of a daemon's session (10).")]
POLL = Annotated[
    str | None,
    typer.Option(
        metavar="S",
        help="Seconds between two polls of gates, nodes and elections, in addition to their watches (30); claims and "
        "jobs are polled each 300 s, or less often with a larger value.",
    ),
]
LIMIT = Annotated[str | None, typer.Option(metavar="N", help="History records kept per table (1000).")]
AGE = Annotated[str | None, typer.Option(metavar="T", help="How long history records are kept: 30d, 36h (no limit).")]
METRICS = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Serve Prometheus metrics here (none).")]
CALL_LIMIT = Annotated[
    str | None,
    typer.Option(metavar="T", help="Time limit for planning an operation, and for its completion code (1h)."),
]
JOB_TIME_LIMIT = Annotated[
    list[str] | None,
    typer.Option(metavar="TYPE=T", help="Time limit of one attempt of a job (repeatable; *: all other types; *=24h)."),
]
VERIFIER_URL = Annotated[
    list[str] | None,
    typer.Option(metavar="URL", help="Allow verifiers at URLs below this one (repeatable; none by default)."),
]
TRUSTED_SPARK_CATALOGS = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,…",
        help="Spark catalogs that may choose classes, hosts and where credentials go, such as REST catalogs (none).",
    ),
]
ACTIONS_LOG = Annotated[
    str | None,
    typer.Option("--actions-log", metavar="FILE", help="Append one line of JSON for each action: who did what."),
]
TYPES = Annotated[str | None, typer.Option(metavar="TYPE,…", help="Serve operations of these types only (all).")]
TABLES = Annotated[
    str | None,
    typer.Option(metavar="TABLE,…", help="Serve these tables only; sales.* matches a prefix (all)."),
]
KEY_FILE = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="HMAC key that signs validation reports; not a TLS key (none)."),
]


def executor(
    id: Annotated[  # noqa: A002
        str | None, typer.Option("--id", metavar="NAME", help="The executor's name (the host's, and kept).")
    ] = None,
    work_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder for local files of one cluster; kept between starts.")
    ] = None,
    shared_dir: SHARED_DIR = None,
    slots: SLOTS = None,
    spark_master: MASTER = None,
    spark_conf: CONF = None,
    ttl: TTL = None,
    poll: POLL = None,
    label: Annotated[list[str] | None, typer.Option(metavar="K=V", help="For `start --where` (repeatable).")] = None,
    history_limit: LIMIT = None,
    history_age: AGE = None,
    metrics: METRICS = None,
    call_limit: CALL_LIMIT = None,
    job_time_limit: JOB_TIME_LIMIT = None,
    verifier_url: VERIFIER_URL = None,
    trusted_spark_catalogs: TRUSTED_SPARK_CATALOGS = None,
    types: TYPES = None,
    tables: TABLES = None,
    certificate_key_file: KEY_FILE = None,
    actions_log: ACTIONS_LOG = None,
) -> None:
    """Run an executor, one on each Spark node. SIGTERM or Ctrl-C stops it in order."""
    from distop.daemon import hardening

    hardening.protect_process()
    import asyncio
    from dataclasses import replace

    from distop.runtime import logs
    from distop.settings import executor_config

    config = executor_config(
        current.settings(
            id=id,
            work_dir=work_dir,
            shared_dir=shared_dir,
            slots=slots,
            spark_master=spark_master,
            spark_conf=spark_conf or None,
            ttl=ttl,
            poll=poll,
            label=label or None,
            history_limit=history_limit,
            history_age=history_age,
            metrics=metrics,
            call_limit=call_limit,
            job_time_limit=job_time_limit or None,
            verifier_url=verifier_url or None,
            trusted_spark_catalogs=trusted_spark_catalogs,
            types=types,
            tables=tables,
            certificate_key_file=certificate_key_file,
            actions_log=actions_log,
        )
    )
    config = replace(config, behaviors=current.behaviors)
    from distop.daemon.process import make_work_dir, run_executor

    make_work_dir(config.work_dir)  # the actions log may be in it
    logs.configure("debug" if current.debug else config.log_level, config.log_format, config.actions_log)
    hardening.forget_credentials()
    try:
        code = asyncio.run(run_executor(config))
    except DistopError as error:
        if config.log_format != "json":
            raise
        # A program that parses the log as JSON parses the last line, too.
        logs.get("distop.executor").error("%s", describe(error), exc_info=error if current.debug else None)
        raise typer.Exit(error.exit_code) from None
    if code:
        raise typer.Exit(code)


def dev(
    data_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Folder for all data (./.distop).")] = None,
    port: Annotated[str | None, typer.Option(metavar="N", help="etcd's port (2379, or a free one).")] = None,
    behavior: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE:CLASS", help="Serve this behavior, installed or not (or MODULE:CLASS; repeatable)."),
    ] = None,
    shared_dir: SHARED_DIR = None,
    slots: SLOTS = None,
    spark_master: MASTER = None,
    spark_conf: CONF = None,
    ttl: TTL = None,
    poll: POLL = None,
    history_limit: LIMIT = None,
    history_age: AGE = None,
    metrics: METRICS = None,
    call_limit: CALL_LIMIT = None,
    job_time_limit: JOB_TIME_LIMIT = None,
    verifier_url: VERIFIER_URL = None,
    trusted_spark_catalogs: TRUSTED_SPARK_CATALOGS = None,
    types: TYPES = None,
    tables: TABLES = None,
    certificate_key_file: KEY_FILE = None,
    actions_log: ACTIONS_LOG = None,
) -> None:
    """Run a private etcd and one executor in the foreground. The data is kept between starts."""
    from distop.daemon import hardening

    hardening.protect_process()
    from pathlib import Path

    from distop.cli.dev import Dev, behaviors_of
    from distop.protocol.executor_nodes import refusal
    from distop.settings import executor_config
    from distop.store.connection_settings import DEFAULT_ENDPOINT

    options: dict[str, Any] = {
        "shared_dir": shared_dir,
        "slots": slots,
        "spark_master": spark_master,
        "spark_conf": spark_conf or None,
        "ttl": ttl,
        "poll": poll,
        "history_limit": history_limit,
        "history_age": history_age,
        "metrics": metrics,
        "call_limit": call_limit,
        "job_time_limit": job_time_limit or None,
        "verifier_url": verifier_url or None,
        "trusted_spark_catalogs": trusted_spark_catalogs,
        "types": types,
        "tables": tables,
        "certificate_key_file": certificate_key_file,
        "actions_log": actions_log,
    }
    settings = current.settings(data_dir=data_dir, port=port, etcd=DEFAULT_ENDPOINT, **options)
    config = executor_config(settings)  # wrong settings are reported before anything starts
    behaviors = behaviors_of(behavior or ())
    for name in behaviors:
        if why := refusal(config.serves, name, ()):
            raise InvalidArgument(f"--behavior {behaviors[name]} cannot be served: {why}")
    arguments = [
        f"--{name.replace('_', '-')}={text}"
        for name, value in options.items()
        if value is not None
        for text in (value if isinstance(value, list) else [value])
    ]
    folder, chosen = Path(settings.get("data_dir")), settings.get("port")
    code = Dev(folder, chosen, arguments, _passed_on(current), behaviors).run()
    if code:
        raise typer.Exit(code)


def _passed_on(context: Context) -> list[str]:
    """The global options that are passed on to the executor."""
    kept = [f"--{name.replace('_', '-')}={context.given[name]}" for name in ("namespace", "log_level", "log_format")
            if name in context.given]  # fmt: skip
    # The same file, or none: it was checked once.
    kept.append(f"--config={context.file.path or os.devnull}")
    return [*kept, "--debug"] if context.debug else kept
