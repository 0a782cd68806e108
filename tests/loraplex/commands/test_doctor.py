"""`loraplex doctor` as a process: what fails is named with what to do, and the exit code tells."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from loraplex.box import checkup
from loraplex.settings import Settings
from ops.build import BuildError
from ops.processor import REQUIRED, Processor
from tests.loraplex.test_certificates import write


def every_finding(folder: Path, code: int, **settings: object) -> list[dict[str, str]]:
    """Where the exit code is this one."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    environment |= {"LORAPLEX_DATA_DIR": str(folder / "data"), "LORAPLEX_PORT": "0"}
    environment |= {name: str(value) for name, value in settings.items()}
    command = [sys.executable, "-m", "loraplex", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == code, done.stdout + done.stderr
    assert code == 2 or done.stdout, done.stderr
    return [] if code == 2 else json.loads(done.stdout)


def doctor(folder: Path, code: int, **settings: object) -> dict[tuple[str, str], dict[str, str]]:
    """Findings by check and state."""
    findings = every_finding(folder, code, **settings)
    return {(each["check"], each["state"]): each for each in findings}


def test_a_machine_where_nothing_runs_yet(tmp_path: Path) -> None:
    found = doctor(tmp_path, 0)
    assert not (tmp_path / "data").exists()
    assert ("disk", "ok") in found and ("compiler", "ok") in found
    assert "nothing serves" in found["server", "skipped"]["found"]


def test_kernels_for_amx_are_checked_once_they_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(variant: str) -> None:
        raise BuildError(f"{variant} cannot be used: no permission")

    def find() -> tuple[str, str]:
        ((state, text, _advice),) = checkup.CHECKS["compiler"](Settings())
        return state, text

    monkeypatch.setattr(Processor, "here", lambda: Processor("GenuineIntel", REQUIRED["amx"]))
    monkeypatch.setattr(checkup, "find_library", lambda _: None)
    state, text = find()
    assert state == "ok" and text.endswith("compiles kernels for amx")
    monkeypatch.setattr(checkup, "find_library", lambda _: tmp_path)
    monkeypatch.setattr(checkup, "load", lambda _: None)
    assert find() == ("ok", "kernels for amx give the bits that they are specified to give")
    monkeypatch.setattr(checkup, "load", fail)
    assert find() == (
        "warning",
        "amx cannot be used: no permission; kernels for avx512 are used",
    )


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("amx", "amx: unpacked into the first-level cache, just before each product on tiles"),
        ("avx512", "avx512: unpacked in registers up to 8 rows, "),
        ("avx2", "avx2: unpacked in registers up to 1 row, or 2 of 8-bit weights, "),
    ],
)
def test_it_names_the_way_in_which_quantised_weights_are_unpacked(
    variant: Any, expected: str
) -> None:
    ((state, text, _),) = checkup.CHECKS["quantised weights"](Settings(kernel_variant=variant))
    assert state == "ok" and text.startswith(expected)


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
    assert "transport_authority has expired" in found["certificates", "failed"]["found"]
    assert found["certificates", "failed"]["advice"] == "renew it"
    assert str(port) in found["ports", "failed"]["found"]
    assert ("versions", "ok") in found


def test_folders_that_others_may_write_to_and_what_is_no_store(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o777)
    (tmp_path / "file").touch()
    found = doctor(tmp_path, 1, LORAPLEX_STORE=tmp_path / "file" / "store")
    assert f"chmod 700 {data}" == found["data directory", "warning"]["advice"]
    assert "file" in found["store", "failed"]["found"]


class Troubled(BaseHTTPRequestHandler):
    """A server of another version whose clock is an hour behind, not ready, with three workers."""

    ANSWERS: ClassVar[dict[str, tuple[int, object]]] = {
        "/readyz": (503, {"status": "the catalog is not loaded"}),
        "/version": (200, {"version": "0.0.9"}),
        "/admin/v1/workers": (
            200,
            {
                "data": [
                    {"id": "w-1", "state": "lost"},
                    {"id": "w-2", "state": "draining"},
                    {"id": "w-3", "state": "unreached", "reason": "no TLS connection"},
                ],
                "has_more": False,
            },
        ),
    }

    def do_GET(self) -> None:
        status, body = self.ANSWERS[urlsplit(self.path).path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() - 3600)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Stranger(Troubled):
    """No loraplex at all."""

    ANSWERS: ClassVar[dict[str, tuple[int, object]]] = dict.fromkeys(Troubled.ANSWERS, (200, []))


def of_server(folder: Path, handler: type[Troubled]) -> tuple[str, list[tuple[str, str]]]:
    """Its URL, and states and texts of what is found of it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    findings = every_finding(folder, 1, LORAPLEX_URL=url, LORAPLEX_KEY="lpx_key")
    server.shutdown()
    server.server_close()
    found = [(each["state"], each["found"]) for each in findings if each["check"] == "server"]
    return url, found


def test_what_is_no_loraplex_is_found_too(tmp_path: Path) -> None:
    _, found = of_server(tmp_path, Stranger)
    assert found[-1][0] == "failed" and found[-1][1].startswith("the check failed")


def test_a_server_in_trouble(tmp_path: Path) -> None:
    url, found = of_server(tmp_path, Troubled)
    expected = [
        ("failed", f"{url} is not ready"),
        ("warning", "the server is 0.0.9"),
        ("failed", "the server's clock differs by 3"),
        ("failed", "worker w-1 is lost"),
        ("warning", "worker w-2 is draining"),
        ("failed", "worker w-3 is unreached: no TLS connection"),
    ]
    assert len(found) == len(expected)
    for (state, text), (expected_state, begin) in zip(found, expected, strict=True):
        assert state == expected_state and text.startswith(begin), found


@pytest.mark.parametrize("name", ["LORAPLEX_PORTT", "LORAPLEX_MEMORY"])
def test_wrong_settings_have_an_exit_code_of_their_own(tmp_path: Path, name: str) -> None:
    doctor(tmp_path, 2, **{name: "x"})
