"""Sizes of the product that may only fall. A change that lowers one lowers its number here too.
Only a change that adds a capability, and names it in its title, raises one, by what it adds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.source_tree import NOT_READ, ROOT, source_tree

SOURCES = {".py", ".sql", ".cpp", ".h", ".yaml"}
LINES = {
    "adapters": 5_420,
    "admin": 9_640,
    "gateway": 20_070,
    "k8s": 2_150,
    "loraplex": 10_300,
    "memory": 2_240,
    "migrations": 1_660,
    "ops": 8_280,
    "sandbox": 450,
    "store": 1_510,
    "telemetry": 570,
    "tools": 1_930,
    "web": 2_720,
    "workers": 19_210,
}
"""Lines of a package's own files, rounded up."""
GENERATED = {"k8s/rendered": 5_380}
"""Lines of files in packages that a tool writes."""
READ_FIRST = ("Engine", "Scheduler", "AdapterPool", "ModelRunner")
"""Classes whose modules, with all that they import, are the core of the engine."""
READ_FIRST_LINES = 7_130
CLOSURES = {("Scheduler",): 21, ("Scheduler", "AdapterPool", "ModelRunner"): 40, READ_FIRST: 47}
"""Numbers of modules that the classes' modules import, directly or not, themselves included.
Kernels, layers and model families do not count."""


def num_lines(path: Path) -> int:
    """Returns the lines of a file, or of the sources in a folder that no tool writes."""
    if path.is_file():
        return path.read_text().count("\n")
    inside = [ROOT / name for name in GENERATED if ROOT / name != path]
    return sum(
        num_lines(file)
        for file in path.rglob("*")
        if file.suffix in SOURCES and not any(map(file.is_relative_to, inside))
    )


@pytest.mark.parametrize("name", [*LINES, *GENERATED])
def test_lines(name: str) -> None:
    assert num_lines(ROOT / name) <= {**LINES, **GENERATED}[name]


@pytest.mark.parametrize("names", CLOSURES, ids=" ".join)
def test_import_closures(names: tuple[str, ...]) -> None:
    tree = source_tree()
    modules = tree.reach(*map(tree.home_of, names), without=NOT_READ)
    print(f"{tree.num_lines(modules):,} lines in {len(modules)} modules")
    assert len(modules) <= CLOSURES[names], sorted(modules)
    assert names != READ_FIRST or tree.num_lines(modules) <= READ_FIRST_LINES
