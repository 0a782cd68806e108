"""Import rules of the product's packages, kept by reading the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

import adapters.format.validator
import adapters.manifest
import memory.page_key
import ops.base
import ops.triton_table
from tools.source_tree import PACKAGES, ROOT, is_within, source_tree

ALLOWED: dict[str, tuple[str, ...]] = {
    "ops": (),
    "memory": (),
    "migrations": (),
    "sandbox": (),
    "telemetry": (),
    "adapters": ("memory", "ops"),
    "workers": ("adapters", "memory", "ops", "sandbox", "telemetry"),
    "store": ("adapters.format.strict_json", "adapters.manifest", "telemetry"),
    "web": ("store",),
    "admin": (
        "store",
        "web",
        "sandbox",
        "adapters.manifest",
        "adapters.format.module_list",
        "adapters.format.other_files",
        "adapters.format.patterns",
        "adapters.format.signature",
        "adapters.format.strict_json",
        "adapters.format.validator",
        "adapters.errors",
        "adapters.store",
        "migrations",
        "telemetry",
    ),
    "gateway": (
        "workers.wire",
        "sandbox",
        "telemetry",
        "adapters.manifest",
        "adapters.reference",
        "store",
        "web",
    ),
    "loraplex": PACKAGES,
}


ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "workers": {
        "wire": (),
        "scheduling": ("wire",),
        "policies": ("scheduling",),
        "constraints": ("scheduling",),
        "device": (),
        "layers": ("device",),
        "models": ("layers",),
        "importer": ("models",),
        "execution": ("models", "scheduling"),
        "observe": ("execution",),
        "verification": ("observe",),
        "base_models": ("verification",),
        "process": ("base_models", "constraints", "importer", "policies"),
    },
    "gateway": {
        "catalog": (),
        "text": (),
        "limits": ("catalog", "text"),
        "metering": ("catalog", "text"),
        "dispatch": ("limits", "metering"),
        "dialects": ("dispatch",),
        "requests": ("dispatch",),
        "http": ("dialects", "requests"),
        "control": ("dispatch",),
    },
    "admin": {
        "tenants": (),
        "keys": (),
        "adapters": (),
        "quotas": ("adapters",),
        "uploads": ("adapters", "quotas"),
        "prices": (),
        "usage": (),
        "audit": (),
        "workers": (),
        "models": (),
        "overview": ("workers",),
        "upkeep": ("adapters", "workers"),
        "http": (
            *("tenants", "keys", "adapters", "quotas", "uploads", "upkeep"),
            *("prices", "usage", "audit", "workers", "models", "overview"),
        ),
    },
    "adapters": {"format": (), "store": (), "pool": ("format", "store")},
    "loraplex": {"load": (), "roles": (), "box": ("roles",), "commands": ("load", "box")},
}
"""Rooms of the large packages, each with those it may import; what they may import it may too.
A module beside the rooms is below all of them, and imports none."""

ABOVE_ROOMS = re.compile(
    r"workers\.__main__|gateway\.app|admin\.app|loraplex\.(__main__|cli)|admin\.\w+\.(\w+_)?routes"
)
"""Modules that put the rooms together."""

CROSSINGS = {}
"""Imports against the order of rooms that are still to be taken out: importer, imported."""


@pytest.mark.parametrize("package", PACKAGES)
def test_only_the_allowed_imports(package: str) -> None:
    for module in source_tree().sources:
        if not is_within(module, package):
            continue
        for name in source_tree().imports[module]:
            assert is_within(name, package, *ALLOWED[package]), f"{module} imports {name}"


def test_no_circle() -> None:
    """Type-only imports count."""
    assert not source_tree().circles()


def reach(rooms: dict[str, tuple[str, ...]], room: str) -> set[str]:
    """The room and everything it may import."""
    return {room}.union(*(reach(rooms, below) for below in rooms[room]))


def crossings(package: str) -> set[tuple[str, str]]:
    """Imports that go against the order of the package's rooms."""
    rooms, found = ROOMS[package], set[tuple[str, str]]()
    for module in source_tree().sources:
        if not is_within(module, package) or ABOVE_ROOMS.fullmatch(module):
            continue
        room = module.split(".")[1] if module.count(".") else ""
        allowed = reach(rooms, room) if room in rooms else set()
        for name in source_tree().imports[module]:
            if name.startswith(package + ".") and (other := name.split(".")[1]) not in allowed:
                is_below = other not in rooms and not ABOVE_ROOMS.fullmatch(name)
                if not is_below:
                    found.add((module, name))
    return found


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_what_is_below(package: str) -> None:
    known = {(importer, name) for importer, name in CROSSINGS if is_within(importer, package)}
    assert crossings(package) == known


def test_the_core_does_not_know_how_memory_is_evicted() -> None:
    """It evicts through `PageSource`."""
    for module in source_tree().sources:
        if re.fullmatch(r"memory\.\w+", module) or is_within(module, "workers.scheduling"):
            for name in source_tree().imports[module]:
                is_eviction = is_within(name, "memory.eviction")
                assert not is_eviction or module == "memory.eviction", f"{module} imports {name}"


def test_constants_that_import_rules_keep_apart_are_equal() -> None:
    assert ops.base.PAGE_TOKENS == memory.page_key.PAGE_TOKENS
    assert ops.base.PROJECTIONS == adapters.manifest.PROJECTIONS
    assert ops.triton_table.ALIGNMENT == adapters.format.validator.IMAGE_ALIGNMENT


def test_no_drawers() -> None:
    drawers = {"utils", "util", "common", "helpers", "misc"}
    assert not [name for name in source_tree().sources if drawers & set(name.split("."))]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gateway.app", ("torch",)),
        ("admin.app", ("torch",)),
        ("loraplex.cli", ("torch", "boto3", "obstore")),
        ("adapters.format.validator", ("torch",)),
        ("workers.wire.client", ("torch",)),
        ("workers.importer", ("torch",)),
        ("workers.execution.engine", ("litestar", "asyncpg")),
        ("workers.scheduling.scheduler", ("torch", "llguidance")),
        ("admin.uploads.sandbox", ("litestar", "asyncpg")),
        ("workers.wire.grammar_sandbox", ("torch", "numpy")),
    ],
)
def test_heavy_libraries_stay_out(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(sorted(sys.modules.keys() & set({absent!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    assert done.stdout == b"[]\n"


def test_no_unsafe_loading() -> None:
    for path, tree in source_tree().trees.items():
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    banned = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
                    assert not banned & {alias.name for alias in names}, path
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                    raise AssertionError(f"torch.load in {path}")
                case _:
                    pass


def test_files_that_the_pages_name_exist() -> None:
    folders = "|".join((*PACKAGES, "benchmarks", "docs", "tests", "tools"))
    name = re.compile(rf"`((?:{folders})/[\w./-]+)`")
    for page in [*ROOT.glob("docs/[!h]*/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for path in name.findall(page.read_text()):
            is_there = (ROOT / path).exists() or (ROOT / f"{path}.py").exists()
            assert is_there, f"{page.name} names {path}"


def test_links_between_the_pages_lead_to_a_heading() -> None:
    pages = [*ROOT.glob("docs/*/*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md")]
    for page in pages:
        for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in _anchors(target.read_text()), f"{page.name}: {link}"


def _anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub makes for the headings of a page."""
    headings = re.findall(r"^#+ (.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
