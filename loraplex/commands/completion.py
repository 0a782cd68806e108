"""`loraplex completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print what makes SHELL complete commands and options.

    \b
    bash  echo 'eval "$(loraplex completion bash)"' >> ~/.bashrc
    zsh   echo 'eval "$(loraplex completion zsh)"' >> ~/.zshrc
    fish  loraplex completion fish > ~/.config/fish/completions/loraplex.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    # The name and the variable by which the command knows that a shell asks.
    click.echo(kind(context.find_root().command, {}, "loraplex", "_LORAPLEX_COMPLETE").source())
