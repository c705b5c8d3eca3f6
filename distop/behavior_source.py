"""Behaviors named by file or module, without being installed.

``distop dev --behavior``.

``FILE.py:CLASS`` names a file, ``MODULE:CLASS`` an importable module. ``python -m distop.behavior_source`` loads one in
a process of its own and prints JSON: its operation type, or the reason why it cannot be loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior
from distop.errors import InvalidArgument, describe
from distop.protocol.frozen import frozen
from distop.protocol.texts import did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@frozen
class BehaviorSource:
    """The location of a behavior's class.

    ``module``: a module's name, or the absolute path of a file.
    """

    module: str
    name: str

    @classmethod
    def parse(cls, text: str) -> BehaviorSource:
        """Raises InvalidArgument unless the text has the form ``MODULE:CLASS`` or ``FILE.py:CLASS``."""
        where, _, name = text.rpartition(":")
        is_file = where.endswith(".py")
        if not name.isidentifier() or not (is_file or _MODULE.fullmatch(where)):
            raise InvalidArgument(
                f"--behavior must be FILE.py:CLASS or MODULE:CLASS, such as ./row_count.py:RowCount, not {shown(text)}"
            )
        return cls(str(Path(where).absolute()) if is_file else where, name)

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def load(self) -> type[Behavior]:
        """Import the module and return the class.

        Raises InvalidArgument if the module has no such behavior, and any exception of the module's code.
        """
        module = _from_file(Path(self.module)) if "/" in self.module else importlib.import_module(self.module)
        found = getattr(module, self.name, None)
        if isinstance(found, type) and issubclass(found, Behavior):
            return found
        classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
        own = [n for n, c in classes.items() if issubclass(c, Behavior) and c.__module__ == module.__name__]
        if found is not None:
            problem = f"{self.name} in {self.module} is not a subclass of distop.behavior.Behavior"
        else:
            problem = f"{self.module} has no class {self.name}"
        hint = did_you_mean(self.name, own) or f" (behaviors in it: {', '.join(own) or 'none'})"
        raise InvalidArgument(f"{problem}{hint}")


def _from_file(path: Path) -> ModuleType:
    """Import a file as a module named ``distop_dev_…``, so that it cannot replace a module of the same name.

    Its folder goes to the end of the import path, so that no file in it replaces an installed module.
    """
    if not path.is_file():
        raise InvalidArgument(f"there is no file {path}")
    name = f"distop_dev_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    if (known := sys.modules.get(name)) is not None:
        if known.__file__ != str(path):
            raise InvalidArgument(f"{path} and {known.__file__} have the same file name: rename one of them")
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    with suppress(ImportError):
        from pyspark import cloudpickle

        # Spark's Python workers cannot import this module, so its functions are sent to them by value.
        by_value: Any = cloudpickle.register_pickle_by_value
        by_value(module)
    return module


def _problem(text: str, error: BaseException) -> str:
    """Why a behavior cannot be loaded, in one sentence."""
    if isinstance(error, InvalidArgument):
        return f"--behavior {text}: {error}"
    where, _, name = text.rpartition(":")
    if isinstance(error, ModuleNotFoundError) and error.name and f"{where}.".startswith(f"{error.name}."):
        problem = f"--behavior {text}: the module {error.name} is not installed"
        file = f"{error.name.replace('.', '/')}.py"
        if Path(file).is_file():
            problem += f" (the current folder is not searched: to load the file, use --behavior ./{file}:{name})"
        return problem
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
    message = error.msg if isinstance(error, SyntaxError) else describe(error)
    return f"--behavior {text} cannot be loaded: {type(error).__name__}: {message}{place}"


def main(argv: Sequence[str]) -> None:
    """Load the behavior that the first argument names, and print ``{"type": …}`` or ``{"error": …}``."""
    output, sys.stdout = sys.stdout, sys.stderr  # the module may print, too
    try:
        source = BehaviorSource.parse(argv[0])
        answer = {"type": source.load()().declaration().type_name}
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        answer = {"error": _problem(argv[0], error)}
    output.write(json.dumps(answer))
    output.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
