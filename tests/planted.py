"""Modules planted in a folder: each leaves a mark when it is imported by the wrong process."""

from __future__ import annotations

from pathlib import Path

NAMES = (
    *("sitecustomize.py", "usercustomize.py", "torch.py", "numpy.py", "msgspec.py", "click.py"),
    *(
        "asyncpg.py",
        "litestar/__init__.py",
        "gateway/__init__.py",
        "admin/__init__.py",
        "store/__init__.py",
    ),
    *("workers/__init__.py", "adapters/__init__.py", "ops/__init__.py", "embedded_postgres.py"),
)
"""Libraries and packages of every role, and what Python itself looks for when it starts."""


def plant(folder: Path, marks: Path) -> None:
    """Whatever of `NAMES` is imported out of `folder` leaves a file of its name in `marks`."""
    marks.mkdir(exist_ok=True)
    for name in NAMES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(marks / name.replace('/', '.'))!r}, 'w').close()\n")
