"""`loraplex chat` on terminals and through pipes, against a gateway whose worker is scripted."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from tests.gateway.live import Live
from tests.preloaded import ROOT
from tests.scripted_worker import Reply
from tests.terminal import CTRL_C, CTRL_D, UP, Terminal, terminal
from tests.waiting import eventually
from workers.wire.protocol import Generate

LETTERS = sorted(ByteLevel.alphabet())
BLANK, NEWLINE = "Ġ", "Ċ"


def text_of(request: Generate) -> str:
    """The prompt, special tokens left out."""
    letters = "".join(LETTERS[token] for token in request.tokens if token < len(LETTERS))
    return letters.replace(BLANK, " ").replace(NEWLINE, "\n")


def tokens_of(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text.replace(" ", BLANK)]


def script(request: Generate) -> Reply:
    """Talks without end to `talk`; else the number of its messages."""
    text = text_of(request)
    if "talk" in text.rpartition("user\n")[2]:
        return Reply(tokens_of("bla "), never_ends=True)
    return Reply(tokens_of(f"heard {text.count('user')}"))


class Room:
    def __init__(self, live: Live, url: str, folder: Path) -> None:
        self.worker = live.worker
        self.folder = folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")},
            "LORAPLEX_URL": url,
            "LORAPLEX_KEY": live.key,
            "LORAPLEX_DATA_DIR": str(folder / "none"),
            "XDG_STATE_HOME": str(folder),
        }

    @property
    def heard(self) -> str:
        return text_of(self.worker.requests[-1])

    def chat(self, *arguments: str, columns: int = 80) -> AbstractAsyncContextManager[Terminal]:
        return terminal("chat", *arguments, environment=self.environment, columns=columns)

    async def pipe(self, *arguments: str, stdin: str = "", code: int = 0) -> tuple[str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loraplex", "chat", *arguments),
            env=self.environment,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate(stdin.encode())
        assert process.returncode == code, err
        return out.decode(), err.decode()


@pytest.fixture
async def room(live: Live, tmp_path: Path) -> AsyncIterator[Room]:
    live.worker.script = script
    await live.make_ready("1")
    async with live.worker, live.gateway() as plane:
        yield Room(live, str(plane.client.base_url).rstrip("/"), tmp_path)


async def test_a_session_on_a_terminal(room: Room) -> None:
    async with room.chat("bot", "--verbose") as screen:
        banner = await screen.read_until("Ctrl-D ends")
        assert "bot, version 1 of tenant acme, on tiny, at http://127.0.0.1" in banner.replace(
            "\n", " "
        )
        screen.type("one\n")
        await screen.read_until("heard 1")
        told = await screen.read_until("tokens/s")
        assert "answer 7 tokens, first after " in told and "prompt " in told

        screen.type("talk\n")
        await screen.read_until("bla bla")
        screen.type(CTRL_C)
        await screen.read_until("stopped; Ctrl-D ends")
        await eventually(lambda: room.worker.num_running == 0)
        assert len(room.worker.aborted) == 1

        # The line before the last, edited.
        screen.type(f"{UP}{UP} more\n")
        await screen.read_until("heard 3")
        assert "one more" in room.heard and "bla bla" in room.heard

        screen.type("/clear\n/system be brief\n")
        await screen.read_until("the system message is set")
        screen.type("two\n")
        await screen.read_until("heard 1")
        assert "be brief" in room.heard and "one" not in room.heard

        screen.type("/model none\n")
        await screen.read_until("there is no model 'none'; choose one of bot, tiny")
        screen.type("/model tiny\n")
        await screen.read_until("tiny, a base model")
        screen.type("three\n")
        await screen.read_until("heard 2")
        assert room.worker.requests[-1].adapter is None

        screen.type("/what\n")
        await screen.read_until("there is no command /what; /help")
        # Typed before the prompt is there, it would be no key but the end of a line.
        await screen.read_until("> ")
        screen.type(CTRL_D)
        assert await screen.wait() == 0
    history = room.folder / "loraplex" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "one more" in history.read_text()
    async with room.chat("bot") as screen:
        await screen.read_until("> ")
        screen.type(f"{UP}{UP}\n")
        await screen.read_until("heard 1")
        assert "three" in room.heard
        screen.type("/exit\n")
        assert await screen.wait() == 0


async def test_a_narrow_terminal_breaks_no_word(room: Room) -> None:
    async with room.chat("bot", columns=40) as screen:
        banner = await screen.read_until("ends")
        screen.type("/help\n")
        banner += await screen.read_until("Ctrl-C stops an answer.")
    lines = [line for line in banner.splitlines() if not line.startswith(">")]
    assert all(len(line) < 40 or "://" in line for line in lines), lines
    assert "/help lists" in banner


async def test_a_terminal_gets_no_control_of_a_model(room: Room) -> None:
    room.worker.script = lambda _: Reply([LETTERS.index("ě"), *tokens_of("[2Jdone")])
    async with room.chat("bot", "clear it") as screen:
        await screen.read_until("[2Jdone")
        assert await screen.wait() == 0
    assert (await room.pipe("bot", "clear it"))[0] == "\x1b[2Jdone\n"


@pytest.mark.full
async def test_a_prompt_or_a_whole_pipe_is_asked_once(room: Room) -> None:
    assert await room.pipe("bot", "say", "it") == ("heard 1\n", "")
    assert "user\nsay it\n" in room.heard
    assert await room.pipe("bot", stdin="first\nsecond\n") == ("heard 1\n", "")
    assert "user\nfirst\nsecond\n" in room.heard
    await room.pipe("bot", "sum up:", stdin="first\n")
    assert "user\nsum up:\n\nfirst\n" in room.heard
    assert "give a PROMPT" in (await room.pipe("bot", stdin="\n", code=2))[1]
    assert "tokens/s" in (await room.pipe("bot", "x", "--verbose"))[1]
    refused = (await room.pipe("none", "x", code=1))[1]
    assert refused == "loraplex: there is no model 'none'; choose one of bot, tiny\n"
