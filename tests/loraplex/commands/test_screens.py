"""Each list fits into 60, 80 and 120 columns and has tabbed values in a pipe,
from fixed answers of a server. The list of adapters is compared with `screens/adapter_list.txt`,
which WRITE_SCREENS=1 rewrites."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from loraplex.cli import cli
from tests.loraplex.commands.answers import answers

SCREENS = Path(__file__).parent / "screens"
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
WIDTHS = (60, 80, 120)
COMMANDS = {
    "tenant_list": ("tenant", "list"),
    "tenant_show": ("tenant", "show", "acme"),
    "key_list": ("key", "list", "--tenant", "acme"),
    "adapter_list": ("adapter", "list"),
    "adapter_show": ("adapter", "show", "support-bot", "--tenant", "acme"),
    "adapter_show_version": ("adapter", "show", "support-bot@2", "--tenant", "acme"),
    "adapter_history": ("adapter", "history", "support-bot", "--tenant", "acme"),
    "adapter_rejected": ("adapter", "rejected", "--tenant", "acme"),
    "model_list": ("model", "list"),
    "model_show": ("model", "show", "smollm2-135m-instruct"),
    "workers_list": ("workers", "list"),
    "workers_show": ("workers", "show", "worker-0"),
    "quota_show": ("quota", "show", "--tenant", "acme"),
    "price_list": ("price", "list"),
    "usage": ("usage", "--group-by", "tenant,model,adapter,adapter_version,key"),
    "usage_credits": ("usage", "credits"),
    "audit_list": ("audit", "list"),
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that has the fixed answers and no other."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # As if it were some seconds ago: ages are whole minutes, and stay so until they are
            # shown, however long the tests before have taken.
            known = answers(datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=5))
            found = known.get(self.path.partition("?")[0].removeprefix("/admin/v1/"))
            body = json.dumps(found or {"error": {"message": self.path}}).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_URL", url)
    monkeypatch.setenv("LORAPLEX_KEY", "lpx_key")
    monkeypatch.setenv("LORAPLEX_DATA_DIR", "/nonexistent")


def printed(arguments: tuple[str, ...], width: int | None) -> str:
    """By a command whose standard output is a terminal of this width; None: a pipe."""
    if width is None:
        reader, writer = os.pipe()
    else:
        reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        settings = termios.tcgetattr(writer)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(writer, termios.TCSANOW, settings)
    given, received = sys.stdout, bytearray()

    def read() -> None:
        try:
            while chunk := os.read(reader, 1 << 16):
                received.extend(chunk)
        except OSError:  # how a terminal says that its other side is closed
            pass

    reading = threading.Thread(target=read)
    reading.start()
    try:
        with open(writer, "w", encoding="utf-8") as sys.stdout:
            cli(arguments, standalone_mode=False)
    finally:
        sys.stdout = given
        reading.join()
        os.close(reader)
    return received.decode()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_list_fits_its_terminal(name: str) -> None:
    for width in WIDTHS:
        lines = printed(COMMANDS[name], width).splitlines()
        assert lines and max(map(cell_len, lines)) <= width
        assert not [line for line in lines if line != line.rstrip(" ")]
    lines = printed(COMMANDS[name], None).splitlines()
    assert lines and not [line for line in lines if line != line.rstrip(" ")]
    if name.endswith("_list"):
        assert len(lines) > 1 and len({line.count("\t") for line in lines}) == 1


def test_the_list_of_adapters_at_each_width() -> None:
    widths = [(str(width), width) for width in WIDTHS] + [("pipe", None)]
    found = "\n".join(
        f"{title}\n{MOMENT.sub('<time>', printed(COMMANDS['adapter_list'], width))}"
        for title, width in widths
    )
    file = SCREENS / "adapter_list.txt"
    if os.environ.get("WRITE_SCREENS"):
        file.write_text(found)
    assert found == file.read_text()
