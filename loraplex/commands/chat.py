"""`loraplex chat`: a session on a terminal, or one answer to a prompt or a pipe."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from loraplex.commands.options import route
from loraplex.errors import ApiFailure, NoKey, Refused
from loraplex.output import print_answer
from loraplex.settings import Settings, load_settings

if TYPE_CHECKING:
    from loraplex.api import Api

KEY_S = 3600
"""How long a key lives that a chat makes for itself, if its end cannot revoke it."""
MAX_HISTORY = 1000
"""Lines of earlier sessions."""
HELP = """\
/model [NAME]    talk to another model; without NAME list all
/system [TEXT]   set the system message; without TEXT remove it
/clear           forget what was said
/exit            end, as Ctrl-D does
Ctrl-C stops an answer."""


@click.command("chat")
@click.argument("model")
@click.argument("prompt", nargs=-1)
@click.option("--tenant", help="Whose models; with an admin key, which makes a key for the chat.")
@click.option("--system", help="A system message.")
@click.option("--max-tokens", type=int)
@click.option("--temperature", type=float)
@click.option("--verbose", is_flag=True, help="After each answer its tokens, and how fast.")
def chat_command(
    model: str,
    prompt: tuple[str, ...],
    tenant: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    verbose: bool,
) -> None:
    """Talk to MODEL: an adapter, adapter@alias, adapter@version or a base model.

    With a PROMPT, or with text from a pipe, it answers once; the pipe follows the prompt."""
    if temperature is not None and not isfinite(temperature):
        raise click.UsageError(f"--temperature: {temperature} is no number")
    options = {"max_tokens": max_tokens, "temperature": temperature}
    question = None if sys.stdin.isatty() and not prompt else _read_question(prompt)
    with _speaking(load_settings({}), tenant, model) as api:
        chat = Chat(api, model, system, options, verbose)
        if question is None:
            _run_session(chat)
            return
        try:
            chat.answer(question)
        except Refused as error:
            raise _with_choices(api, model, error) from error


class Chat:
    """What was said, and to which model."""

    def __init__(
        self, api: Api, model: str, system: str | None, options: dict[str, Any], verbose: bool
    ) -> None:
        self.api = api
        self.model = model
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._options = options
        self._verbose = verbose

    def answer(self, question: str) -> None:
        """Prints the answer as it comes. A stopped answer is kept as far as it was said, a failed
        one is as if it was never asked for. Raises ApiFailure and KeyboardInterrupt."""
        self.messages.append({"role": "user", "content": question})
        said: list[str] = []
        try:
            self._print(said)
        except BaseException:
            if not said:
                self.messages.pop()
            raise
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})

    def _print(self, said: list[str]) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        events = self.api.chat(
            self.model,
            system + self.messages,
            stream_options={"include_usage": True},
            **self._options,
        )
        started, first, usage = time.monotonic(), None, {}
        try:
            for event in events:
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        first = first or time.monotonic()
                        said.append(piece)
                        print_answer(piece)
        finally:
            if said or sys.exc_info()[0] is None:
                click.echo()
        if self._verbose:
            click.echo(_speed(usage, started, first), err=True)


def _run_session(chat: Chat) -> None:
    """Until the end of standard input or /exit."""
    _tell(_describe(chat))
    _tell("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
    with _line_editing():
        while True:
            try:
                line = _ask().strip()
                if line == "/exit":
                    return
                if line.startswith("/"):
                    _obey(chat, line)
                elif line:
                    chat.answer(line)
            except EOFError:
                click.echo(err=True)
                return
            except KeyboardInterrupt:
                click.echo("\nstopped; Ctrl-D ends", err=True)
            except ApiFailure as error:
                click.echo(str(error), err=True)


def _obey(chat: Chat, line: str) -> None:
    """A command of the session."""
    word, _, rest = line.partition(" ")
    match word, rest.strip():
        case "/help", _:
            _tell(HELP)
        case "/model", "":
            _tell("\n".join(_names(chat.api)))
        case "/model", name:
            before, chat.model = chat.model, name
            try:
                _tell(_describe(chat))
            except ApiFailure:
                chat.model = before
                raise
        case "/system", text:
            chat.system = text or None
            _tell("the system message is set" if text else "there is no system message now")
        case "/clear", _:
            chat.messages.clear()
            _tell("forgotten")
        case _:
            _tell(f"there is no {word}; /help lists what there is")


def _describe(chat: Chat) -> str:
    """With what one talks. Raises ApiFailure, with the choices if there is no such model."""
    try:
        card = chat.api.get(f"/v1/models/{quote(chat.model, safe='@')}")
    except Refused as error:
        raise _with_choices(chat.api, chat.model, error) from None
    if (adapter := card["adapter"]) is None:
        return f"{card['id']}, a base model, at {chat.api.url}"
    return (
        f"{card['id']}, version {adapter['version']} of tenant {card['owned_by']}, on"
        f" {card['parent']}, at {chat.api.url}"
    )


def _with_choices(api: Api, model: str, error: Refused) -> ApiFailure:
    """The error; if there is no such model, one that names those that are there."""
    if error.code != "model_not_found":
        return error
    return ApiFailure(f"there is no model {model!r}; there are {', '.join(_names(api))}")


def _names(api: Api) -> list[str]:
    return sorted(card["id"] for card in api.get("/v1/models")["data"])


def _read_question(prompt: tuple[str, ...]) -> str:
    """The prompt, and all that comes through a pipe. Raises UsageError if that is nothing, and
    UnicodeError."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    question = "\n\n".join(part for part in (" ".join(prompt), piped.strip()) if part)
    if not question:
        raise click.UsageError("standard input is empty: give a PROMPT")
    question.encode()
    return question


def _ask() -> str:
    """The next line. Raises EOFError."""
    if sys.stdout.isatty():
        return input("> ")
    click.echo("> ", nl=False, err=True)
    if line := sys.stdin.readline():
        return line
    raise EOFError


@contextmanager
def _line_editing() -> Iterator[None]:
    """Arrow keys, and the lines of earlier sessions in a file that is private."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    file = state / "loraplex" / "chat_history"
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        readline.read_history_file(file)
    readline.set_history_length(MAX_HISTORY)
    try:
        yield
    finally:
        # Without a place for it, the session had its own alone.
        with suppress(OSError):
            readline.write_history_file(file)


@contextmanager
def _speaking(settings: Settings, tenant: str | None, model: str) -> Iterator[Api]:
    """With a known key of the tenant; else with one made by an admin key, revoked at the end."""
    from loraplex.api import connect, connect_tenant

    try:
        api = connect_tenant(settings, tenant)
    except NoKey as missing:
        refusal: ApiFailure = missing
    else:
        with api:
            refused = _refusal_of_key(api, model)
            if refused is None:
                yield api
                return
            refusal = refused
    with connect(settings) as admin:
        name = _choose_tenant(admin, tenant, refusal)
        expires_at = (datetime.now(UTC) + timedelta(seconds=KEY_S)).isoformat()
        wanted = {"name": "chat", "scopes": ["inference"], "expires_at": expires_at}
        made = admin.post(route("tenants", name, "keys"), wanted)
        try:
            with connect_tenant(settings, None, made["key"]) as api:
                yield api
        finally:
            admin.delete(route("keys", made["record"]["id"]))


def _refusal_of_key(api: Api, model: str) -> Refused | None:
    """What keeps the key from asking any model, such as that it is an admin's."""
    try:
        api.get(f"/v1/models/{quote(model, safe='@')}")
    except Refused as refused:
        return refused if refused.status == 403 else None
    return None


def _choose_tenant(admin: Api, tenant: str | None, refusal: ApiFailure) -> str:
    """The one that was named, or is chosen on a terminal. Raises ApiFailure."""
    if tenant is not None:
        return tenant
    try:
        names = [each["name"] for each in admin.all("/admin/v1/tenants")]
    except Refused:
        # No admin key: what the model's route said stands.
        raise refusal from None
    if not names:
        raise ApiFailure("there is no tenant yet: `loraplex quickstart NAME` makes one with a key")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ApiFailure(
            "an admin key asks no model: give --tenant NAME, and the chat makes a key of it for"
            f" an hour; there are {', '.join(names)}"
        )
    _tell("An admin key asks no model. A key for an hour is made, and revoked at the end.")
    return click.prompt("Of which tenant", default=names[0], type=click.Choice(names), err=True)


def _tell(text: str) -> None:
    """Beside the answers, within the width of the terminal."""
    width = max(shutil.get_terminal_size().columns - 1, 20)
    for line in text.splitlines():
        click.echo(
            textwrap.fill(line, width, break_on_hyphens=False, replace_whitespace=False), err=True
        )


def _speed(usage: dict[str, Any], started: float, first: float | None) -> str:
    """Tokens of prompt and answer, the time to the first, and the rate of the others."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt = f"prompt {usage.get('prompt_tokens', 0)} tokens, {cached} cached"
    if first is None:
        return prompt
    number, seconds = usage.get("completion_tokens", 0), time.monotonic() - first
    rate = f", then {(number - 1) / seconds:.1f} tokens/s" if number > 1 and seconds > 0 else ""
    return f"{prompt}; answer {number} tokens, first after {first - started:.2f} s{rate}"
