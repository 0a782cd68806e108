"""What files and servers say is read on a terminal, and never acted on, by whatever command."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from rich import progress
from rich.text import Text

from loraplex.neutral_console import NeutralConsole
from loraplex.neutral_text import NeutralText, neutral
from tests.preloaded import run

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202ereversed\r\x08\x7f"
ACTING = "\x1b\x07\x9b\u202e\r\x08\x7f"
HOSTILE_PARTS = ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\u202e", "\x08", "\x7f")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def test_what_acts_is_spelled() -> None:
    spelled = r"\u001b[2J\u001b]0;title\u0007\u009b31m\u202ereversed\u000d\u0008\u007f"
    assert neutral(HOSTILE) == spelled
    for ensures_ascii in (True, False):
        assert json.loads(neutral(json.dumps([HOSTILE], ensure_ascii=ensures_ascii))) == [HOSTILE]
    plain = "Grüße, 世界\n\tשלום 👩‍💻 e\u0301"
    assert neutral(plain) == plain
    assert neutral("\ud800") == r"\ud800"


class Plane:
    """A server that refuses all, or answers all, with hostile words."""

    def __init__(self) -> None:
        self.is_kind = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        plane = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                body = json.dumps(plane.answer()).encode()
                self.send_response(200 if plane.is_kind else 400)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def answer(self) -> dict[str, Any]:
        if not self.is_kind:
            return {"error": {"message": HOSTILE, "code": HOSTILE, "type": HOSTILE}}
        names = ("id", "name", "alias", "key", "model", "state", "tenant", "version", "digest")
        one: dict[str, Any] = dict.fromkeys(names, HOSTILE)
        one |= {"canary": None, "pinned": False, "in_flight": 0, "record": {"id": HOSTILE}}
        one |= {"num_running": 1, "num_waiting": 1, "aliases": [HOSTILE], "served": True}
        return one | {"data": [], "has_more": False}


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    made = Plane()
    with made.server as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield made
        server.shutdown()
        thread.join()


@pytest.fixture
def environment(plane: Plane) -> dict[str, str]:
    plane.is_kind = False
    own = {name: text for name, text in os.environ.items() if not name.startswith("LORAPLEX_")}
    url = f"http://127.0.0.1:{plane.server.server_address[1]}"
    return own | {"LORAPLEX_URL": url, "LORAPLEX_KEY": "lpx_key", "LORAPLEX_DATA_DIR": "/none"}


def assert_neutral(printed: str, words: str = "title") -> None:
    assert words in printed, printed
    found = [character for character in ACTING if character in printed]
    assert not found, repr(printed)


def assert_harmless(shown: str) -> None:
    """On a terminal, where bars and colours of our own act."""
    found = [part for part in HOSTILE_PARTS if part in shown]
    assert not found, repr(shown)


def on_terminal(arguments: Sequence[str], environment: dict[str, str]) -> str:
    """All that a command writes to a terminal."""
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "loraplex", *arguments],
        env=environment,
        stdin=writer,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    printed = b""
    while True:
        try:
            chunk = os.read(reader, 1 << 16)
        except OSError:
            break
        printed += chunk
    process.wait()
    os.close(reader)
    return printed.decode(errors="replace").replace("\r\n", "\n")


REFUSED = [
    ("tenant", "create", "acme"),
    ("tenant", "list"),
    ("key", "create", "--tenant", "acme"),
    ("key", "revoke", "abc"),
    ("model", "list"),
    ("model", "load", "tiny"),
    ("adapter", "promote", "bot@1"),
    ("adapter", "delete", "bot", "--yes"),
    ("quota", "show", "--tenant", "acme"),
    ("price", "list"),
    ("usage",),
    ("audit", "list"),
    ("workers", "drain", "w-1"),
    ("status",),
    ("chat", "bot", "hello"),
]


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_the_words_of_a_refusal(arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    done = run("loraplex", *arguments, environment=environment)
    assert done.status == 1
    assert_neutral(done.stdout + done.stderr)


ANSWERED = [
    ("tenant", "create", "acme"),
    ("key", "create", "--tenant", "acme"),
    ("key", "revoke", "abc"),
    ("adapter", "promote", "bot@1"),
    ("adapter", "rollback", "bot"),
    ("model", "load", "tiny"),
    ("adapter", "delete", "bot@1", "--yes"),
]


@pytest.mark.parametrize("arguments", ANSWERED, ids=" ".join)
def test_the_words_of_an_answer(
    arguments: tuple[str, ...], environment: dict[str, str], plane: Plane
) -> None:
    plane.is_kind = True
    done = run("loraplex", *arguments, environment=environment)
    for character in ACTING:
        assert character not in done.stdout + done.stderr, repr(done.stdout + done.stderr)


def folder_of(tmp_path: Path, config: bytes, name: str = "bot") -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / CONFIG).write_bytes(config)
    (folder / WEIGHTS).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return folder


CONFIGS = {
    "type": json.dumps({"peft_type": HOSTILE}).encode(),
    "key": json.dumps({"peft_type": "LORA", "r": 1, HOSTILE: 1}).encode(),
    "raw": f'{{"peft_type": "{HOSTILE}"}}'.encode(),
    "no JSON": HOSTILE.encode(),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_hostile_folder_is_pushed(
    config: str, environment: dict[str, str], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, CONFIGS[config])
    done = run("loraplex", "adapter", "push", str(folder), environment=environment)
    assert done.status == 1
    assert_neutral(done.stdout + done.stderr, "adapter")
    assert_harmless(on_terminal(["adapter", "push", str(folder)], environment))


def test_hostile_names_of_folders_and_files(environment: dict[str, str], tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "")
    folder = folder_of(tmp_path, b"{}", name)
    (folder / CONFIG).unlink()
    manifest = tmp_path / f"{name}.json"
    manifest.write_text(json.dumps([{"folder": name, HOSTILE: 1}]))
    for arguments in (
        (str(folder),),
        ("--manifest", str(manifest)),
        (str(folder_of(tmp_path, b"{}")), "--serving", str(manifest)),
        (str(tmp_path / f"none{name}"),),
    ):
        done = run("loraplex", "adapter", "push", *arguments, environment=environment)
        assert done.status != 0
        assert_neutral(done.stdout + done.stderr)


def test_hostile_settings(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"host = {json.dumps(HOSTILE)}\n{json.dumps(HOSTILE)} = 1\n")
    done = run("loraplex", "config", "--config", str(file), environment=environment)
    assert_neutral(done.stdout + done.stderr)


def test_every_way_to_write(tmp_path: Path) -> None:
    file = tmp_path / "printed"
    with NeutralText(file.open("wb"), encoding="utf-8") as text:
        print(HOSTILE, file=text)
        text.writelines([HOSTILE, HOSTILE])
        logging.StreamHandler(text).handle(logging.makeLogRecord({"msg": HOSTILE}))
        click.echo(HOSTILE, file=text)
    assert_neutral(file.read_text())
    assert file.read_text().count("title") == 5


def test_bars_and_spinners_move_and_their_texts_do_not() -> None:
    file = io.StringIO()
    console = NeutralConsole(file, force_terminal=True, width=200, color_system="standard")
    with progress.Progress(
        progress.TextColumn("{task.description}", markup=False), console=console
    ) as bars:
        bars.add_task(HOSTILE)
        console.print(Text(HOSTILE, style="bold red"))
    with console.status(Text(HOSTILE)):
        console.print("between")
    shown = file.getvalue()
    assert r"\u001b[2J" in shown and "\x1b[1;31m" in shown
    assert_harmless(shown)
