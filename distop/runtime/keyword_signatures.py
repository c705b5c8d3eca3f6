"""Shows the fields of a dataclass as keywords in the signatures of the functions that take them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

F = TypeVar("F", bound="Callable[..., Any]")


def takes_fields_of(options: type, names: Collection[str] | None = None) -> Callable[[F], F]:
    """Show these fields in the signature of a function that takes them as ``**keywords``. ``names``: only these."""

    def shown(function: F) -> F:
        own = inspect.signature(function)
        named = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        further = [
            one
            for name, one in inspect.signature(options).parameters.items()
            if name not in own.parameters and (names is None or name in names)
        ]
        function.__signature__ = own.replace(parameters=[*named, *further])  # type: ignore[attr-defined]
        return function

    return shown
