"""The help of each command is whole: an example that is valid, and a text for each option."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from loraplex.cli import cli
from loraplex.commands.command import Command, Group


def below(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        assert command is not None
        yield f"{name} {each}", command
        if isinstance(command, click.Group):
            yield from below(command, f"{name} {each}")


COMMANDS = dict(below(cli, "loraplex"))


def test_each_example_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "support-bot").mkdir()
    for name in ("id_ed25519.pub", "loraplex.toml"):
        (tmp_path / name).touch()
    for name, command in COMMANDS.items():
        assert isinstance(command, Command), name
        if command.example is None:
            assert isinstance(command, Group) and not command.invoke_without_command, name
            continue
        arguments = shlex.split(command.example.replace("\\\n", ""))
        with command.make_context(name, arguments) as context:
            assert f"Example:\n  {context.command_path} " in f"{command.get_help(context)} "


def test_each_option_has_a_text_and_no_sentence_is_cut() -> None:
    for name, command in {"loraplex": cli, **COMMANDS}.items():
        with click.Context(command, info_name=name, terminal_width=80) as context:
            text = command.get_help(context)
        assert "..." not in text.partition("\n")[2].replace("]...", ""), name
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help and option.help.endswith((".", ")")), (name, option.name)
