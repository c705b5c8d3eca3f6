"""Behaviors given to ``distop dev --behavior`` as FILE.py:CLASS or MODULE:CLASS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distop.behavior_source import BehaviorSource
from distop.cli.dev import behaviors_of
from distop.errors import InvalidArgument
from tests.support.command import distop_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.command import Ran

__all__ = ["distop_command"]

CODE = """
from pydantic import BaseModel
from distop.behavior import Behavior

class Arg(BaseModel):
    pass

class {name}(Behavior):
    type_name = "{type}"
    Arg = Arg

    def start_or_resume_job(self, arg, partition, ctx):
        return 1

def double(x):
    return 2 * x

class Other:
    pass
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file that defines a behavior."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE.format(name="Mine", type="mine"))
    return tmp_path


def test_a_file_is_named_by_its_path_and_class(here: Path) -> None:
    source = BehaviorSource.parse("./mine.py:Mine")
    assert str(source) == f"{here}/mine.py:Mine"
    assert BehaviorSource.parse(str(source)) == source
    assert str(BehaviorSource.parse("package.mine:Mine")) == "package.mine:Mine"
    assert behaviors_of(["./mine.py:Mine"]) == {"mine": str(source)}


@pytest.mark.parametrize(
    "text", ["mine", "mine.py", "mine.py:", ":Mine", "./mine:Mine", "a-b:Mine", "mine.py:1", "a..b:M"]
)
def test_a_behavior_must_be_named_by_file_or_module_and_class(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^--behavior must be FILE.py:CLASS or MODULE:CLASS"):
        BehaviorSource.parse(text)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("none.py:Mine", "--behavior none.py:Mine: there is no file {here}/none.py"),
        ("mine.py:Mein", "--behavior mine.py:Mein: {here}/mine.py has no class Mein (did you mean 'Mine'?)"),
        ("mine.py:Other", "Other in {here}/mine.py is not a subclass of distop.behavior.Behavior "
                          "(behaviors in it: Mine)"),
        ("json:JSONDecoder", "JSONDecoder in json is not a subclass of distop.behavior.Behavior "
                             "(behaviors in it: none)"),
        ("mine:Mine", "the module mine is not installed (the current folder is not searched: to load the file, use "
                      "--behavior ./mine.py:Mine)"),
        ("nowhere.at.all:Mine", "--behavior nowhere.at.all:Mine: the module nowhere is not installed"),
        ("broken.py:Mine", "--behavior broken.py:Mine cannot be loaded: ZeroDivisionError: division by zero "
                           "({here}/broken.py:2)"),
        ("syntax.py:Mine", "cannot be loaded: SyntaxError: invalid syntax ({here}/syntax.py:1)"),
        ("leaves.py:Mine", "cannot be loaded: SystemExit: 3"),
        ("killed.py:Mine", "cannot be loaded: Python exited with code 4"),
        ("wrong.py:Mine", "wrong.py:Mine: behavior mine: retry.attempts is 0, but must be at least 1"),
    ],
)  # fmt: skip
def test_a_behavior_that_cannot_be_loaded_is_refused_before_anything_starts(
    here: Path, distop_command: Callable[..., Ran], named: str, message: str
) -> None:
    (here / "broken.py").write_text("x = 1\nx / 0\n")
    (here / "syntax.py").write_text("class ?\n")
    (here / "leaves.py").write_text("raise SystemExit(3)\n")
    (here / "killed.py").write_text("import os\nos._exit(4)\n")
    attempts = "\nfrom distop.behavior import Retry\nMine.retry = Retry(attempts=0)\n"
    (here / "wrong.py").write_text(CODE.format(name="Mine", type="mine") + attempts)
    ran = distop_command("dev", "--behavior", named)
    assert (ran.code, message.format(here=here) in ran.sentence) == (2, True), ran.sentence
    assert not (here / ".distop").exists()


def test_two_behaviors_of_one_type_and_types_not_served_are_refused(
    here: Path, distop_command: Callable[..., Ran]
) -> None:
    (here / "again.py").write_text(CODE.format(name="Again", type="mine"))
    ran = distop_command("dev", "--behavior", "mine.py:Mine", "--behavior", "again.py:Again")
    assert (ran.code, "have the same type mine" in ran.sentence) == (2, True), ran.sentence
    ran = distop_command("dev", "--behavior", "mine.py:Mine", "--types", "validate")
    assert (ran.code, "mine.py:Mine cannot be served" in ran.sentence) == (2, True), ran.sentence
    assert not (here / ".distop").exists()


def test_two_classes_of_one_file_share_a_module(here: Path) -> None:
    (here / "mine.py").write_text(CODE.format(name="Mine", type="mine") + CODE.format(name="Also", type="also"))
    found = [BehaviorSource.parse(f"mine.py:{name}").load() for name in ("Mine", "Also")]
    assert found[0].__module__ == found[1].__module__ == "distop_dev_mine"
    other = here / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text(CODE.format(name="Mine", type="mine"))
    with pytest.raises(InvalidArgument, match="have the same file name: rename one of them"):
        BehaviorSource.parse(f"{other}:Mine").load()


def test_functions_of_a_file_run_on_spark_workers_that_cannot_import_it(here: Path) -> None:
    program = """
import sys
from distop.behavior_source import BehaviorSource
source = BehaviorSource.parse("mine.py:Mine")
module = sys.modules[source.load().__module__]
from pyspark import cloudpickle
sys.stdout.buffer.write(cloudpickle.dumps(module.double))
"""
    pickled = subprocess.run([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, check=True, cwd=here).stdout
    worker = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(21))"
    ran = subprocess.run([sys.executable, "-P", "-c", worker], input=pickled, stdout=subprocess.PIPE, check=True)
    assert ran.stdout == b"42\n"


def test_only_dev_has_the_option_behavior(distop_command: Callable[..., Ran]) -> None:
    """Options of ``executor``, the settings file and variables cannot load code that is not installed."""
    from distop.settings import SETTINGS, Settings, executor_config

    ran = distop_command("executor", "--behavior", "mine.py:Mine")
    assert (ran.code, "No such option: --behavior" in ran.sentence) == (2, True), ran.sentence
    assert not {name for name in SETTINGS if "behavior" in name}
    variables = {"DISTOP_BEHAVIOR": "mine.py:Mine", "DISTOP_BEHAVIORS": '{"mine": "mine.py:Mine"}'}
    assert executor_config(Settings({"work_dir": "x"}, variables)).behaviors == {}
