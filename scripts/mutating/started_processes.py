"""Changed modules in the processes that tests start: the worker's child, and its guardian.

A child is a new interpreter, which imports this ``sitecustomize`` from PYTHONPATH. The guardian runs without it, but as
a file, so another file is given to it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from distop.worker import guardian

_FOLDER = tempfile.TemporaryDirectory(prefix="distop-mutants-")
"""Removed when this process exits; forked ones only add to it."""
_FINDER = """
import importlib.util, os, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        file = os.path.join(os.path.dirname(__file__), name, name.rpartition(".")[2] + ".py")
        if os.path.exists(file):
            return importlib.util.spec_from_file_location(name, file)

sys.meta_path.insert(0, Finder)
"""
_REPORT = """
def {name}(n):
    import os
    to = os.open({path!r}, os.O_WRONLY | os.O_APPEND)
    os.write(to, b"%d " % n)
    os.close(to)
"""
_FUTURE = "from __future__ import annotations\n"


def replace_modules(sources: Mapping[str, str]) -> None:
    """Let the processes that are started from now on run these sources: name of a module → its text."""
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.name))
    (folder / "sitecustomize.py").write_text(_FINDER)
    for module, text in sources.items():
        file = folder / module / f"{module.rpartition('.')[2]}.py"
        file.parent.mkdir()
        file.write_text(text)
        if module == guardian.__name__:
            guardian.__file__ = str(file)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def report_from(marked: Mapping[str, str], name: str) -> Callable[[], set[int]]:
    """Replace modules by texts that call the function ``name`` with numbers.

    Returns a function that returns the numbers since its last call.
    """
    handle, path = tempfile.mkstemp(dir=_FOLDER.name)
    os.close(handle)
    report = _REPORT.format(name=name, path=path)
    replace_modules({module: _FUTURE + report + text.replace(_FUTURE, "") for module, text in marked.items()})

    def numbers() -> set[int]:
        text = Path(path).read_text()
        os.truncate(path, 0)
        return set(map(int, text.split()))

    return numbers
