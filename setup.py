"""The package list, found rather than written down; everything else is in pyproject.toml.

``behaviors/`` is installed as ``distop_behaviors``: a mapping that setuptools' declarative form cannot combine
with finding sub-packages.
"""

from setuptools import find_packages, setup

BEHAVIORS = "distop_behaviors"

setup(
    packages=[
        *find_packages(include=["distop", "distop.*"]),
        BEHAVIORS,
        *(f"{BEHAVIORS}.{name}" for name in find_packages("behaviors")),
    ],
    package_dir={BEHAVIORS: "behaviors"},
)
