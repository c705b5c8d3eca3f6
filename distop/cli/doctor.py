"""``distop doctor``: what could keep distop from working here, each with what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from distop.cli import output
from distop.cli.command_context import current
from distop.errors import DistopError, describe

if TYPE_CHECKING:
    from distop.client.async_client import Client
    from distop.services.doctor import Finding


def doctor() -> None:
    """Check etcd, this machine and the executors. Exits with 1 if a check is an error."""
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
    wrong = any(finding.status == "error" for finding in findings)
    if current.json:
        checks = [{"name": f.name, "status": f.status, "text": f.text} for f in findings]
        output.write_json({"ok": not wrong, "checks": checks})
    else:
        output.table(("check", "status", "what"), [(f.name, f.status, f.short or f.text) for f in findings], "")
    if wrong:
        raise typer.Exit(unreachable or 1)
