"""`loraplex chat`: a session on a terminal, or one answer to a prompt or a pipe."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from loraplex.commands.command import Command
from loraplex.commands.options import route
from loraplex.errors import ApiFailure, NoKey, Refused
from loraplex.output import print_answer
from loraplex.settings import Settings, load_settings
from loraplex.tables import wrapped

if TYPE_CHECKING:
    from loraplex.api import Api

KEY_S = 3600
"""Lifetime in seconds of a key that a chat creates. It limits the harm if the key cannot be revoked
at the end."""
MAX_HISTORY = 1000
"""Maximum lines kept from earlier sessions."""
HELP = """\
/model [NAME]    talk to another model; without NAME list all
/system [TEXT]   set the system message; without TEXT remove it
/clear           forget the conversation
/exit            end the session, as Ctrl-D does
Ctrl-C stops an answer."""


@click.command("chat", cls=Command, example='support-bot "Where is my parcel?"', output="text")
@click.argument("model")
@click.argument("prompt", nargs=-1)
@click.option(
    "--tenant", help="With an admin key: tenant to chat as, with a temporary key made for it."
)
@click.option("--system", help="System message.")
@click.option("--max-tokens", type=int, help="Maximum tokens of an answer (default: the server's).")
@click.option("--temperature", type=float, help="Sampling temperature (default: the model's).")
@click.option("--verbose", is_flag=True, help="Print tokens and speed after each answer.")
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

    With a PROMPT, or with text from a pipe, it answers once. Text from a pipe is appended
    to the PROMPT."""
    if temperature is not None and not isfinite(temperature):
        raise click.UsageError(f"--temperature: {temperature} is not a number")
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
    """Conversation with one model."""

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
        """Prints the answer as it arrives. If the answer is interrupted, the printed part is kept
        in the conversation. A question without any answer is removed. Raises ApiFailure and
        KeyboardInterrupt."""
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
    """Runs a session until the end of standard input or /exit."""
    _print_note(_describe(chat))
    _print_note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
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
    """Executes a command of the session."""
    word, _, rest = line.partition(" ")
    match word, rest.strip():
        case "/help", _:
            _print_note(HELP)
        case "/model", "":
            _print_note("\n".join(_names(chat.api)))
        case "/model", name:
            before, chat.model = chat.model, name
            try:
                _print_note(_describe(chat))
            except ApiFailure:
                chat.model = before
                raise
        case "/system", text:
            chat.system = text or None
            _print_note("the system message is set" if text else "there is no system message now")
        case "/clear", _:
            chat.messages.clear()
            _print_note("the conversation is forgotten")
        case _:
            _print_note(f"there is no command {word}; /help lists the commands")


def _describe(chat: Chat) -> str:
    """Returns a description of the chat's model. Raises ApiFailure, which lists the models, if this
    model does not exist."""
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
    """Returns the error, with a list of the existing models if the model does not exist."""
    if error.code != "model_not_found":
        return error
    return ApiFailure(f"there is no model {model!r}; choose one of {', '.join(_names(api))}")


def _names(api: Api) -> list[str]:
    return sorted(card["id"] for card in api.get("/v1/models")["data"])


def _read_question(prompt: tuple[str, ...]) -> str:
    """Returns the prompt followed by all text from a pipe. Raises UsageError if both are empty, and
    UnicodeError."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    question = "\n\n".join(part for part in (" ".join(prompt), piped.strip()) if part)
    if not question:
        raise click.UsageError("standard input is empty: give a PROMPT")
    question.encode()
    return question


def _ask() -> str:
    """Returns the next line that the user types. Raises EOFError."""
    if sys.stdout.isatty():
        return input("> ")
    click.echo("> ", nl=False, err=True)
    if line := sys.stdin.readline():
        return line
    raise EOFError


@contextmanager
def _line_editing() -> Iterator[None]:
    """Enables arrow keys and a history of lines. A file that only this account can read keeps the
    history between sessions."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = Path(os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state"))
    if not state.is_absolute():
        # The account has no home directory.
        yield
        return
    file = state / "loraplex" / "chat_history"
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        readline.read_history_file(file)
    readline.set_history_length(MAX_HISTORY)
    try:
        yield
    finally:
        # If the file cannot be written, the lines of this session are lost.
        with suppress(OSError):
            readline.write_history_file(file)


@contextmanager
def _speaking(settings: Settings, tenant: str | None, model: str) -> Iterator[Api]:
    """Yields a client that may query models. It uses a known key of the tenant, or a temporary key
    that is created with an admin key and revoked at the end."""
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
    """Returns the server's refusal if the key may not query any model, such as an admin key.
    Otherwise returns None."""
    try:
        api.get(f"/v1/models/{quote(model, safe='@')}")
    except Refused as refused:
        return refused if refused.status == 403 else None
    return None


def _choose_tenant(admin: Api, tenant: str | None, refusal: ApiFailure) -> str:
    """Returns the given tenant, or lets the user choose one on a terminal. Raises ApiFailure."""
    if tenant is not None:
        return tenant
    try:
        names = [each["name"] for each in admin.all("/admin/v1/tenants")]
    except Refused:
        # The key is not an admin key either, so the first refusal is reported.
        raise refusal from None
    if not names:
        raise ApiFailure(
            "there is no tenant yet: `loraplex quickstart NAME` creates one with a key"
        )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ApiFailure(
            "an admin key may not query models: give --tenant NAME, and the chat creates a key"
            f" for an hour; the tenants are {', '.join(names)}"
        )
    _print_note(
        "An admin key may not query models. A tenant's key is created, and revoked at the end."
    )
    return click.prompt(
        "Chat as which tenant", default=names[0], type=click.Choice(names), err=True
    )


def _print_note(text: str) -> None:
    """Prints text to standard error, wrapped to the width of the terminal."""
    width = max(shutil.get_terminal_size().columns - 1, 20)
    click.echo(wrapped(text, width, indent=""), err=True)


def _speed(usage: dict[str, Any], started: float, first: float | None) -> str:
    """Returns a line with the numbers of prompt and answer tokens, the time to the first token, and
    the rate of the tokens after it."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt = f"prompt {usage.get('prompt_tokens', 0)} tokens, {cached} cached"
    if first is None:
        return prompt
    number, seconds = usage.get("completion_tokens", 0), time.monotonic() - first
    rate = f", then {(number - 1) / seconds:.1f} tokens/s" if number > 1 and seconds > 0 else ""
    return f"{prompt}; answer {number} tokens, first after {first - started:.2f} s{rate}"
