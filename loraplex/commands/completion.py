"""Command `loraplex completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from loraplex.commands.command import Command

SHELLS = ("bash", "zsh", "fish")


@click.command("completion", cls=Command, example="bash", output="text")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print a script that makes SHELL complete commands and options.

    \b
    bash  echo 'eval "$(loraplex completion bash)"' >> ~/.bashrc
    zsh   echo 'eval "$(loraplex completion zsh)"' >> ~/.zshrc
    fish  loraplex completion fish > ~/.config/fish/completions/loraplex.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    # The last two arguments are the program's name, and the variable by which the command
    # recognises a completion request of a shell.
    click.echo(kind(context.find_root().command, {}, "loraplex", "_LORAPLEX_COMPLETE").source())
