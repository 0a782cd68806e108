"""`python -m tools.record_gateway`: writes `tests/gateway/recorded.json.gz` from what the gateway
answers now. `test_recorded.py` compares with it; a difference is a defect, or is meant and told in
the commit."""

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
