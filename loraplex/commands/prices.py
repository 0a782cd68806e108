"""Command group `loraplex price`."""

from __future__ import annotations

import click

from loraplex.commands.options import api, json_option, list_options, route
from loraplex.output import show_done, show_list, show_one
from loraplex.tables import Column, Kind

COLUMNS = (
    Column("model", "model", Kind.NAME),
    Column("input", "input", Kind.NUMBER),
    Column("output", "output", Kind.NUMBER),
    Column("cached_input", "cached", Kind.NUMBER),
    Column("updated_at", "changed", Kind.AGE),
)


@click.group("price")
def price_group() -> None:
    """Prices of tokens of a base model and its adapters, in dollars per million."""


@price_group.command("list")
@list_options
def list_prices() -> None:
    """List the prices. Models without a price are free."""
    with api() as server:
        show_list(server.all("/admin/v1/prices", cursor="model"), COLUMNS)


@price_group.command("set")
@click.argument("model")
@click.option("--input", required=True, metavar="DOLLARS", help="Price per million prompt tokens.")
@click.option(
    "--cached-input",
    metavar="DOLLARS",
    help="Price per million cached prompt tokens (default: --input).",
)
@click.option("--output", required=True, metavar="DOLLARS", help="Price per million answer tokens.")
@json_option
def set_price(model: str, **dollars: str | None) -> None:
    """Set the price of a base model for future requests."""
    with api() as server:
        show_one(server.put(route("prices", model), dollars), {"updated_at": Kind.AGE})


@price_group.command("remove")
@click.argument("model")
@json_option
def remove_price(model: str) -> None:
    """Remove the price of a base model: future requests are free."""
    with api() as server:
        gone = server.delete(route("prices", model))
    show_done(gone, f"{model} costs nothing now")
