"""``distop doctor``: what could keep distop from working here, each with what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distop.cli import output
from distop.cli.command_context import current
from distop.errors import DistopError, InvalidArgument, describe

if TYPE_CHECKING:
    from distop.client.async_client import Client
    from distop.services.doctor import Finding


def doctor(
    storage: Annotated[
        str, typer.Option(metavar="URL", help="Try this URL or path with obstore, pyarrow and Spark instead.")
    ] = "",
    no_spark: Annotated[bool, typer.Option("--no-spark", help="With --storage: do not try Spark.")] = False,
) -> None:
    """Check etcd, this machine and the executors. Exits with 1 if a check is an error.

    With --storage, check instead whether this machine can read and publish files at a URL. A few small files are
    written below it and removed. Spark is tried on this machine, with the settings of spark-conf.
    """
    if storage:
        _report(_storage(storage, no_spark))
        return
    if no_spark:
        raise InvalidArgument("--no-spark belongs to --storage")
    _doctor()


def _storage(url: str, no_spark: bool) -> list[Finding]:
    from distop.cli.interrupts import run
    from distop.services.storage_doctor import check_storage

    settings = current.settings()
    spark_conf = None if no_spark else settings.get("spark_conf")
    return run(check_storage(url, settings.get("storage"), spark_conf))


def _doctor() -> None:
    from distop.services.doctor import Finding, check_cluster, check_machine

    findings = [Finding("settings", "warning" if current.file.ignored else "ok", current.file.text), *check_machine()]
    unreachable = 0

    async def work(client: Client) -> list[Finding]:
        return await check_cluster(client.etcd, client.keys)

    try:
        findings = [*current.with_client(work), *findings]
    except DistopError as error:
        if error.exit_code == 2:
            raise
        unreachable = error.exit_code
        findings.insert(0, Finding("etcd", "error", describe(error)))
    _report(findings, unreachable)


def _report(findings: list[Finding], unreachable: int = 0) -> None:
    """Print the findings. Raises Exit if one is an error."""
    wrong = any(finding.status == "error" for finding in findings)
    if current.json:
        checks = [{"name": f.name, "status": f.status, "text": f.text} for f in findings]
        output.write_json({"ok": not wrong, "checks": checks})
    else:
        output.table(("check", "status", "what"), [(f.name, f.status, f.short or f.text) for f in findings], "")
    if wrong:
        raise typer.Exit(unreachable or 1)
