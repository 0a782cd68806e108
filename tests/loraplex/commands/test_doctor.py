"""`loraplex doctor` as a process: what fails is named with what to do, and the exit code tells."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.loraplex.test_certificates import write


def doctor(folder: Path, code: int, **settings: object) -> dict[tuple[str, str], dict[str, str]]:
    """Findings by check and state, where the exit code is this one."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    environment |= {"LORAPLEX_DATA_DIR": str(folder / "data"), "LORAPLEX_PORT": "0"}
    environment |= {name: str(value) for name, value in settings.items()}
    command = [sys.executable, "-m", "loraplex", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    if code == 2:
        return {}
    assert not (folder / "data").exists()
    return {(each["check"], each["state"]): each for each in json.loads(done.stdout)}


def test_a_machine_where_nothing_runs_yet(tmp_path: Path) -> None:
    found = doctor(tmp_path, 0)
    assert ("disk", "ok") in found and ("compiler", "ok") in found
    assert "nothing serves" in found["server", "skipped"]["found"]


def test_what_fails_is_told_with_what_to_do(tmp_path: Path) -> None:
    """All at once: one that fails keeps no other from being made."""
    now = datetime.now(UTC)
    ended = write(tmp_path / "ended.pem", now - timedelta(days=1))
    # Bound and not listened on: a try to reach it is refused at once.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        found = doctor(
            tmp_path,
            1,
            CXX="/nowhere/g++",
            LORAPLEX_MIN_FREE_DISK="900TiB",
            LORAPLEX_TRANSPORT_CERTIFICATE=ended,
            LORAPLEX_TRANSPORT_KEY=ended,
            LORAPLEX_TRANSPORT_AUTHORITY=ended,
            LORAPLEX_MANAGEMENT_PORT=port,
            LORAPLEX_DATABASE_URL="postgresql://nobody@127.0.0.1:1/nothing",
            LORAPLEX_MEMORY="900TiB",
        )
    for check in ("machine", "compiler", "disk", "certificates", "ports", "database"):
        assert (check, "failed") in found, (check, found)
    assert "CXX=/nowhere/g++" in found["compiler", "failed"]["found"]
    assert "ops to reference" in found["compiler", "failed"]["advice"]
    assert "transport_authority has ended" in found["certificates", "failed"]["found"]
    assert found["certificates", "failed"]["advice"] == "renew it"
    assert str(port) in found["ports", "failed"]["found"]
    assert ("versions", "ok") in found


@pytest.mark.parametrize("name", ["LORAPLEX_PORTT", "LORAPLEX_MEMORY"])
def test_wrong_settings_have_an_exit_code_of_their_own(tmp_path: Path, name: str) -> None:
    doctor(tmp_path, 2, **{name: "x"})
