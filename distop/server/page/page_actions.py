"""What the forms of the page do: each calls what a client would call, with the permissions of the caller."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from distop.client.async_operation import parse_ref
from distop.errors import InvalidArgument, NotFound
from distop.protocol.texts import shown
from distop.schemas.argument_schema import encode_argument
from distop.server.page.page_rendering import link
from distop.server.page.start_context import parsed_argument
from distop.services.submission.start_options import StartOptions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from distop.server.page.local_channel import LocalChannel

    Form = Mapping[str, str]

WHOLE = ("priority", "max_jobs", "max_jobs_per_executor")


async def _cancel(channel: LocalChannel, form: Form) -> str:
    await channel.backend().cancel(parse_ref(form.get("op", "")), form.get("text", ""))
    return _of(form, "cancelled")


async def _pause(channel: LocalChannel, form: Form) -> str:
    await channel.backend().pause(parse_ref(form.get("op", "")), bool(form.get("now")))
    return _of(form, "paused")


async def _resume(channel: LocalChannel, form: Form) -> str:
    await channel.backend().resume(parse_ref(form.get("op", "")))
    return _of(form, "resumed")


async def _alter(channel: LocalChannel, form: Form) -> str:
    wanted: dict[str, object] = {name: _whole(name, form[name]) for name in WHOLE if form.get(name, "").strip()}
    if form.get("max_failed", "").strip():
        wanted["max_failed"] = form["max_failed"].strip()
    await channel.backend().alter(parse_ref(form.get("op", "")), StartOptions.of(wanted, "alter").checked())
    return _of(form, "altered")


async def _rerun(channel: LocalChannel, form: Form) -> str:
    unfinished = {"yes": True, "no": False}.get(form.get("unfinished", ""))
    started = await channel.backend().rerun(parse_ref(form.get("op", "")), StartOptions.of({}, "rerun"), unfinished)
    return link("/operation", op=str(started.ref), done="started")


async def _start(channel: LocalChannel, form: Form) -> str:
    options: dict[str, object] = {}
    if form.get("priority", "").strip():
        options["priority"] = _whole("priority", form["priority"])
    if form.get("request_id", "").strip():
        options["request_id"] = form["request_id"].strip()
    argument = encode_argument(parsed_argument(form.get("arg", "")))
    started = await channel.backend().start(
        form.get("type", ""), form.get("table", ""), argument, StartOptions.of(options, "start")
    )
    return link("/operation", op=str(started.ref), done="started")


async def _drain(channel: LocalChannel, form: Form) -> str:
    await channel.backend().drain(form.get("executor", ""), False, None)
    return link("/nodes", done="draining")


async def _undrain(channel: LocalChannel, form: Form) -> str:
    await channel.backend().undrain(form.get("executor", ""))
    return link("/nodes", done="undrained")


async def _pause_policy(channel: LocalChannel, form: Form) -> str:
    await channel.backend().pause_policy(form.get("table", ""), form.get("name", ""))
    return link("/table", name=form.get("table", ""), done="policy-paused")


async def _resume_policy(channel: LocalChannel, form: Form) -> str:
    await channel.backend().resume_policy(form.get("table", ""), form.get("name", ""))
    return link("/table", name=form.get("table", ""), done="policy-resumed")


def _of(form: Form, done: str) -> str:
    return link("/operation", op=form.get("op", ""), done=done)


def _whole(name: str, text: str) -> int:
    try:
        return int(text.strip()[:20])
    except ValueError:
        raise InvalidArgument(f"{name.replace('_', ' ')} must be a whole number, not {shown(text)}") from None


ACTIONS: Mapping[str, Callable[[LocalChannel, Form], Awaitable[str]]] = MappingProxyType(
    {
        "cancel": _cancel,
        "pause": _pause,
        "resume": _resume,
        "alter": _alter,
        "rerun": _rerun,
        "start": _start,
        "drain": _drain,
        "undrain": _undrain,
        "pause-policy": _pause_policy,
        "resume-policy": _resume_policy,
    }
)
"""The name of a form → what it does; returns where the browser goes next."""
DONE: Mapping[str, str] = MappingProxyType(
    {
        "cancelled": "The operation is being cancelled.",
        "paused": "The operation is being paused: running jobs end first.",
        "resumed": "The operation goes on.",
        "altered": "The options are changed.",
        "started": "The operation was started.",
        "draining": "The executor drains: it releases its jobs and claims none.",
        "undrained": "The executor claims jobs again.",
        "policy-paused": "The policy is paused.",
        "policy-resumed": "The policy is active again.",
    }
)
"""What a page says after an action."""


async def act(name: str, channel: LocalChannel, form: Form) -> str:
    """Make the call of the form ``/do/NAME``; returns the path to which the browser is redirected.

    Raises NotFound for an unknown name, InvalidArgument for a field, and what the call raises.
    """
    found = ACTIONS.get(name)
    if found is None:
        raise NotFound(f"the page has no form {shown(name)}")
    return await found(channel, form)
