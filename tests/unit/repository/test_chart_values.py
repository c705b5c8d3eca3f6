"""charts/distop: its values, their schema and its templates name the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from distop import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

CHART = Path(__file__).resolve().parents[3] / "charts/distop"


def paths(values: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The paths of all values. Checks that the schema has the same."""
    known = schema["properties"]
    assert set(values) == set(known) - {"global"}, prefix
    for name, value in values.items():
        if known[name].get("properties") and isinstance(value, dict):
            yield from paths(value, known[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_each_value_is_in_the_schema_and_used() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    found = list(paths(values, schema))
    assert len(found) > 50
    unused = [
        path
        for path in found
        if not re.search(rf"\.{path.rpartition('.')[2]}\b|\"{path.rpartition('.')[2]}\"", templates)
    ]
    assert unused == []


def test_the_chart_has_the_version_of_distop() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
