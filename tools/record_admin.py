"""`python -m tools.record_admin`: records the admin plane's present answers, and what its commands
print, in `tests/admin/recorded.json.gz`. `test_recorded.py` compares them with this record. A
difference is either a defect or an intended change, which the commit message explains."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.admin import recorded


def main() -> None:
    with TemporaryDirectory() as folder:
        recorded.write(asyncio.run(recorded.recorded_now(Path(folder))))


if __name__ == "__main__":
    main()
