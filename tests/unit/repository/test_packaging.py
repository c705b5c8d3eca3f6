"""Contents of the packages, checked without a build (with one: tests/acceptance/test_package.py)."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import check_package
import pages
import pytest

import distop

ROOT = Path(__file__).parents[3]
REGISTRIES = ("py" + "pi.org", "python" + "hosted.org", "index" + "-url =", "extra-" + "index-url")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_package_index() -> None:
    """The index is chosen by pip's own settings."""
    found = [f"{path}: {name}" for path in tracked() for name in REGISTRIES if name.encode() in path.read_bytes()]
    assert found == []


def test_the_version_is_defined_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "distop.__version__"}
    assert check_package.own_version() == distop.__version__
    definition = re.compile(r"^__version__\s*=", re.MULTILINE)
    assert [p.name for p in tracked() if p.suffix == ".py" and definition.search(p.read_text())] == ["__init__.py"]


def test_a_release_needs_its_heading_in_the_changelog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "distop").mkdir()
    (tmp_path / "distop" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    changelog = tmp_path / "CHANGELOG.md"
    monkeypatch.setattr(check_package, "ROOT", tmp_path)
    with pytest.raises(check_package.Problem, match=r"distop.__version__ is 1.2.3, not 1.2.4"):
        check_package.check_release("1.2.4")
    changelog.write_text("# Changelog\n\n## Unreleased\n\n## 1.2.3 - 2027-01-31\n")
    with pytest.raises(check_package.Problem, match=r"is 'Unreleased': write '## 1.2.3 - YYYY-MM-DD'"):
        check_package.check_release("1.2.3")
    changelog.write_text("# Changelog\n\n## 1.2.3 - 2027-01-31\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    with pytest.raises(check_package.Problem, match="there are changes that are not committed"):
        check_package.check_release("1.2.3")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    who = ("-c", "user.name=x", "-c", "user.email=x@y")
    subprocess.run(["git", *who, "commit", "-qm", "x"], cwd=tmp_path, check=True)
    check_package.check_release("1.2.3")


PAGE = """
# A page

```python title="a.py"
print("one"); print("two"); print("three 3")
```

## First

```sh
python3 a.py
```

```text
one
…ee…
```

## Second

```sh
exit 7
```
"""


def test_a_page_is_run_and_its_output_compared(tmp_path: Path) -> None:
    env = pages.environment()
    with pytest.raises(pages.PageError, match="exit code 7"):
        pages.run_page(PAGE, tmp_path, env)
    assert (tmp_path / "a.py").exists()
    pages.run_page(PAGE, tmp_path, env, section="First")
    pages.run_page(PAGE, tmp_path, env, skip=lambda fence: "exit" in fence.text)
    with pytest.raises(pages.PageError, match="no section 'Third'"):
        pages.run_page(PAGE, tmp_path, env, section="Third")
    for wrong in ("four", "two\none"):
        with pytest.raises(pages.PageError, match="was not printed"):
            pages.run_page(PAGE.replace("one\n…ee…", wrong), tmp_path, env, section="First")


def test_a_program_without_a_title_is_run(tmp_path: Path) -> None:
    page = '```python\nprint("hello")\n```\n\n```text\nhello\n```\n\n```python\nraise SystemExit(3)\n```\n'
    with pytest.raises(pages.PageError, match="exit code 3"):
        pages.run_page(page, tmp_path, pages.environment())
