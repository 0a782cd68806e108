"""Click group whose commands are imported only when they are used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """Group that imports a command only to run it, show its help, or list all commands' help."""

    def __init__(self, *args: Any, commands: Mapping[str, str], **options: Any) -> None:
        """`commands` maps each name to MODULE:ATTRIBUTE below `loraplex.commands`."""
        super().__init__(*args, **options)
        self._places = commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self._places.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        return getattr(import_module(f"loraplex.commands.{module}"), attribute)
