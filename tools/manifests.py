"""`make manifests`: renders k8s/overlays to k8s/rendered, with the Kustomize that kubectl has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1] / "k8s"
RENDERED = ROOT / "rendered"
OVERLAYS = sorted(path.parent.name for path in (ROOT / "overlays").glob("*/kustomization.yaml"))

Object = dict[str, Any]


def find_kubectl() -> str | None:
    """Returns the path of kubectl, or None if this machine has none."""
    return shutil.which("kubectl")


def kustomize(kubectl: str, overlay: str) -> str:
    """Returns the overlay's objects as YAML."""
    command = [kubectl, "kustomize", str(ROOT / "overlays" / overlay)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout


def main() -> None:
    kubectl = find_kubectl()
    if kubectl is None:
        sys.exit("make manifests needs kubectl, for its Kustomize")
    RENDERED.mkdir(exist_ok=True)
    for overlay in OVERLAYS:
        head = f"# Rendered from k8s/overlays/{overlay} by `make manifests`: change it there.\n"
        (RENDERED / f"{overlay}.yaml").write_text(head + kustomize(kubectl, overlay))


if __name__ == "__main__":
    main()
