"""Commands that install an optional part of loraplex into this Python environment."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires

_EXTRA = re.compile(r"""(?P<requirement>[^;]+);\s*extra\s*==\s*['"](?P<extra>[\w-]+)['"]""")
_OWN = re.compile(r"loraplex\[(?P<extra>[\w-]+)\]")


def install_command(extra: str) -> str:
    """Returns a shell command that installs the requirements of an extra, such as `s3`, with the
    Python that runs this process. loraplex itself is not installed again, because it may run from a
    checkout."""
    return shlex.join([sys.executable, "-m", "pip", "install", *_requirements(extra)])


def _requirements(extra: str) -> list[str]:
    try:
        declared = requires("loraplex") or []
    except PackageNotFoundError:
        declared = []
    matches = [match for each in declared if (match := _EXTRA.fullmatch(each.strip()))]
    found: list[str] = []
    for match in matches:
        if match["extra"] == extra:
            requirement = match["requirement"].strip()
            own = _OWN.fullmatch(requirement)
            found += _requirements(own["extra"]) if own else [requirement]
    return found or [f"loraplex[{extra}]"]
