"""Commands and groups whose help ends with an example, and the options for the output's format."""

from __future__ import annotations

from typing import Any, Literal

import click

from loraplex.output import set_form

Output = Literal["text", "record", "table"]


class Command(click.Command):
    """Command whose help ends with an example. It has the option --json unless `output` is `text`,
    and the option --wide if `output` is `table`."""

    def __init__(
        self, *args: Any, example: str | None = None, output: Output = "record", **options: Any
    ) -> None:
        """`example` contains the arguments of one example call. It is None for a group that only
        has commands."""
        super().__init__(*args, **options)
        self.example = example
        if output == "table":
            text = "Print all columns, whatever the width of the terminal."
            self.params.append(_form_option("--wide", text))
        if output != "text":
            text = f"Print JSON instead of {'a table' if output == 'table' else 'text'}."
            self.params.append(_form_option("--json", text))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.example is not None:
            # The example is not wrapped, so that its lines can be copied into a shell.
            formatter.write(f"\nExample:\n  {ctx.command_path} {self.example}".rstrip() + "\n")

    def get_short_help_str(self, limit: int = 0) -> str:
        """Returns the whole first sentence of the help, which a list of commands wraps."""
        return super().get_short_help_str(1 << 16)


class Group(Command, click.Group):
    """Group of commands."""

    command_class = Command

    def __init__(self, *args: Any, output: Output = "text", **options: Any) -> None:
        super().__init__(*args, output=output, **options)


def _form_option(name: str, text: str) -> click.Option:
    return click.Option([name], is_flag=True, expose_value=False, callback=set_form, help=text)
