"""`python -m tools.record_engine`: writes `tests/workers/recorded.json` from what the engine does
now. `test_recorded.py` compares with it; a difference is a defect, or is meant and told in the
commit."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.workers import recorded
from tests.workers.base_models.test_swapping import House


def main() -> None:
    with TemporaryDirectory() as folder:
        recorded.write(recorded.recorded_now(House(Path(folder), recorded.FAMILIES)))


if __name__ == "__main__":
    main()
