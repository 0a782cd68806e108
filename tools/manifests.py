"""What `kubectl kustomize` makes of the overlays, for the part of Kustomize that `k8s/` uses:
resources, JSON patches, images.

`python -m tools.manifests` writes `k8s/rendered/`; `make manifests` runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1] / "k8s"
RENDERED = ROOT / "rendered"
OVERLAYS = sorted(path.parent.name for path in (ROOT / "overlays").glob("*/kustomization.yaml"))
KEYS = {"apiVersion", "kind", "resources", "patches", "images"}

Object = dict[str, Any]


def render(folder: Path) -> list[Object]:
    """Objects of a folder with a `kustomization.yaml`, in the order of its resources. Raises
    ValueError for a key of Kustomize that is not supported here."""
    source: Object = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := source.keys() - KEYS:
        raise ValueError(f"{folder}: {', '.join(sorted(unknown))} is not supported")
    objects: list[Object] = []
    for name in source["resources"]:
        path = folder / name
        if path.is_dir():
            objects += render(path)
        else:
            objects += yaml.safe_load_all(path.read_text())
    for patch in source.get("patches", ()):
        _patch(objects, **patch)
    for image in source.get("images", ()):
        for container in all_containers(objects):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def pod_spec(found: Object) -> Object | None:
    """The pod that an object makes, if it makes any."""
    return found.get("spec", {}).get("template", {}).get("spec")


def all_containers(objects: list[Object]) -> list[Object]:
    """Containers and sidecars of all pods."""
    pods = [pod for found in objects if (pod := pod_spec(found)) is not None]
    return [
        each
        for pod in pods
        for part in ("initContainers", "containers")
        for each in pod.get(part, ())
    ]


def to_yaml(objects: list[Object], overlay: str) -> str:
    """Text of the file in `k8s/rendered/`."""
    head = f"# Rendered from k8s/overlays/{overlay} by `make manifests`: change it there.\n"
    return head + yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=120)


class _Plain(yaml.SafeDumper):
    """Writes a value that occurs twice twice, as Kustomize does."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _patch(objects: list[Object], target: Object, patch: str) -> None:
    found = [
        each
        for each in objects
        if each["kind"] == target["kind"] and each["metadata"]["name"] == target["name"]
    ]
    if not found:
        raise ValueError(f"no {target['kind']} {target['name']} to patch")
    for operation in yaml.safe_load(patch):
        for each in found:
            _apply(each, **operation)


def _apply(found: Any, op: str, path: str, value: Any = None) -> None:
    """One operation of RFC 6902; of arrays, elements that are there alone."""
    *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/"))
    for part in parents:
        found = found[int(part) if isinstance(found, list) else part]
    key: Any = int(last) if isinstance(found, list) else last
    match op:
        case "add":
            found[key] = value
        case "replace":
            found[key]  # must be there
            found[key] = value
        case "remove":
            del found[key]
        case _:
            raise ValueError(f"{op} is not supported")


def main() -> None:
    RENDERED.mkdir(exist_ok=True)
    for overlay in OVERLAYS:
        text = to_yaml(render(ROOT / "overlays" / overlay), overlay)
        (RENDERED / f"{overlay}.yaml").write_text(text)


if __name__ == "__main__":
    main()
