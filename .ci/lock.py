"""`lock.py REPORT INDEX [INDEX...]`: prints the requirements that a pip report resolved, each with
its hash.

The report is of `pip install --dry-run --report`. The lock holds for the platform and the index
those indexes that it was made for."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(report: str, index: str, *others: str) -> None:
    print(f"--index-url {index}", *(f"--extra-index-url {other}" for other in others), sep="\n")
    lines: list[str] = []
    for package in json.loads(Path(report).read_text())["install"]:
        archive = package["download_info"].get("archive_info")
        if archive is None:
            # The product itself, which is built from its folder.
            continue
        name, version = package["metadata"]["name"], package["metadata"]["version"]
        lines.append(f"{name}=={version} --hash=sha256:{archive['hashes']['sha256']}")
    print(*sorted(lines, key=str.lower), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
