"""`python -m tools.record_gateway`: records the gateway's present answers in
`tests/gateway/recorded.json.gz`. `test_recorded.py` compares the gateway with this record. A
difference is either a defect or an intended change, which the commit message explains."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.gateway import recorded
from tests.gateway.templated import templated_service


def main() -> None:
    with TemporaryDirectory() as folder, templated_service(Path(folder)) as service:
        recorded.write(recorded.recorded_now(service))


if __name__ == "__main__":
    main()
