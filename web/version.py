"""Version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def this_version() -> str:
    """Returns the version of the installed package, or "not installed"."""
    try:
        return version("loraplex")
    except PackageNotFoundError:
        return "not installed"
