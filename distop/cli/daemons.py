"""Commands that run in the foreground: executor, serve, and dev (a private etcd with an executor and a service)."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from distop.cli.command_context import GlobalOptions, current
from distop.cli.command_options import NOTHING, GivenOptions, setting_options
from distop.errors import DistopError, InvalidArgument, describe

_OF_BOTH = (
    *("shared_dir", "slots", "spark_master", "spark_conf", "ttl", "poll", "history_limit", "history_age", "metrics"),
    *("telemetry", "call_limit", "job_time_limit", "verifier_url", "trusted_spark_catalogs", "export_to", "types"),
    *("tables", "certificate_key_file", "actions_log"),
)
"""Settings of an executor that ``distop dev`` takes and passes on, too."""


@setting_options(("id", "work_dir", "label", *_OF_BOTH))
def executor(given: GivenOptions = NOTHING) -> None:
    """Run an executor, one on each Spark node. SIGTERM or Ctrl-C stops it in order."""
    from distop.daemon import hardening

    hardening.protect_process()
    import asyncio
    from dataclasses import replace

    from distop.runtime import logs
    from distop.settings import executor_config

    config = executor_config(current.settings(**given))
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


@setting_options(
    ("listen", "http", "access", "audit_log", "service_cert", "service_key", "client_ca", "shared_dir", "telemetry")
)
def serve(given: GivenOptions = NOTHING) -> None:
    """Serve gRPC for clients without etcd (grpc://HOST:PORT). SIGTERM or Ctrl-C stops it in order."""
    from distop.daemon import hardening

    hardening.protect_process()  # it holds etcd's credentials
    import asyncio

    from distop.runtime import logs
    from distop.server.process import ServiceConfig
    from distop.server.process import serve as run
    from distop.settings import client_config

    settings = current.settings(**given)
    files = {name: settings.get(name) or "" for name in ("access", "audit_log", "client_ca")}
    pair = {"cert": settings.get("service_cert") or "", "key": settings.get("service_key") or ""}
    listen, http, telemetry = (settings.get(name) for name in ("listen", "http", "telemetry"))
    config = ServiceConfig(client_config(settings), listen, http=http, telemetry=telemetry, **files, **pair)
    logs.configure("debug" if current.debug else settings.get("log_level"), settings.get("log_format"))
    hardening.forget_credentials()
    asyncio.run(run(config))


@setting_options(("data_dir", "port", "http", *_OF_BOTH))
def dev(
    given: GivenOptions = NOTHING,
    behavior: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE:CLASS", help="Serve this behavior, installed or not (or MODULE:CLASS; repeatable)."),
    ] = None,
) -> None:
    """Run a private etcd, one executor and a service with the page. The data is kept between starts."""
    from distop.daemon import hardening

    hardening.protect_process()
    from pathlib import Path

    from distop.cli.dev import Dev, behaviors_of
    from distop.protocol.executor_nodes import refusal
    from distop.settings import executor_config
    from distop.store.connection_settings import DEFAULT_ENDPOINT

    settings = current.settings(etcd=DEFAULT_ENDPOINT, **given)
    config = executor_config(settings)  # wrong settings are reported before anything starts
    behaviors = behaviors_of(behavior or ())
    for name in behaviors:
        if why := refusal(config.serves, name, ()):
            raise InvalidArgument(f"--behavior {behaviors[name]} cannot be served: {why}")
    arguments = [
        f"--{name.replace('_', '-')}={text}"
        for name in _OF_BOTH
        if name in given
        for text in (given[name] if isinstance(given[name], list) else [given[name]])
    ]
    folder, chosen = Path(settings.get("data_dir")), settings.get("port")
    code = Dev(folder, chosen, arguments, _passed_on(current), behaviors, settings.get("http")).run()
    if code:
        raise typer.Exit(code)


def _passed_on(context: GlobalOptions) -> list[str]:
    """The global options that are passed on to the executor."""
    kept = [f"--{name.replace('_', '-')}={context.given[name]}" for name in ("namespace", "log_level", "log_format")
            if name in context.given]  # fmt: skip
    # The same file, or none: it was checked once.
    kept.append(f"--config={context.file.path or os.devnull}")
    return [*kept, "--debug"] if context.debug else kept
