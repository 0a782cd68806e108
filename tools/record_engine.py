"""`python -m tools.record_engine`: records the engine's present behaviour in
`tests/workers/recorded.json`. `test_recorded.py` compares the engine with this record. A difference
is either a defect or an intended change, which the commit message explains."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.workers import recorded
from tests.workers.base_models.test_swapping import StoredModels


def main() -> None:
    with TemporaryDirectory() as folder:
        recorded.write(recorded.recorded_now(StoredModels(Path(folder), recorded.FAMILIES)))


if __name__ == "__main__":
    main()
