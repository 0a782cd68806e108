"""Command group `loraplex price`."""

from __future__ import annotations

import re

import click

from loraplex.commands.command import Group
from loraplex.commands.options import F, api, route
from loraplex.output import show_done, show_list, show_one
from loraplex.tables import Column, Kind

COLUMNS = (
    Column("model", "model", Kind.NAME),
    Column("input", "input", Kind.DOLLARS),
    Column("output", "output", Kind.DOLLARS),
    Column("cached_input", "cached", Kind.DOLLARS),
    Column("updated_at", "changed", Kind.AGE),
)


_DOLLARS = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def _check_dollars(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    if text is not None and not _DOLLARS.fullmatch(text):
        raise click.BadParameter(f"{text!r} is not an amount of dollars such as 0.20")
    return text


def dollars_options(command: F) -> F:
    """Adds to a command the options of a price."""
    for name, tokens in (
        ("output", "answer"),
        ("cached-input", "cached prompt"),
        ("input", "prompt"),
    ):
        is_required = name != "cached-input"
        default = "" if is_required else " (default: --input)"
        text = f"Price in dollars per million {tokens} tokens{default}."
        command = click.option(
            f"--{name}",
            required=is_required,
            metavar="DOLLARS",
            callback=_check_dollars,
            help=text,
        )(command)
    return command


@click.group("price", cls=Group)
def price_group() -> None:
    """Prices of tokens of a base model and its adapters, in dollars per million."""


@price_group.command("list", example="", output="table")
def list_prices() -> None:
    """List the prices. Models without a price are free."""
    show_list(api().all("/admin/v1/prices", cursor="model"), COLUMNS)


@price_group.command("set", example="smollm2-135m-instruct --input 0.20 --output 0.60")
@click.argument("model")
@dollars_options
def set_price(model: str, **dollars: str | None) -> None:
    """Set the price of a base model for future requests."""
    show_one(api().put(route("prices", model), dollars), {"updated_at": Kind.AGE})


@price_group.command("remove", example="smollm2-135m-instruct")
@click.argument("model")
def remove_price(model: str) -> None:
    """Remove the price of a base model: future requests are free."""
    show_done(api().delete(route("prices", model)), f"future requests of {model} are free")
