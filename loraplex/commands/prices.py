"""`loraplex price`."""

from __future__ import annotations

import click

from loraplex.commands.options import api, json_option, route
from loraplex.output import show

COLUMNS = ("model", "input", "cached_input", "output", "updated_at")


@click.group("price")
def price_group() -> None:
    """What tokens of a base model and its adapters cost: dollars a million."""


@price_group.command("list")
@json_option
def list_prices(as_json: bool) -> None:
    """List the prices. A model that is not here costs nothing."""
    with api() as server:
        show(server.all("/admin/v1/prices", cursor="model"), COLUMNS, as_json)


@price_group.command("set")
@click.argument("model")
@click.option("--input", required=True, metavar="DOLLARS", help="A million prompt tokens.")
@click.option("--cached-input", metavar="DOLLARS", help="Those found in the cache; as --input.")
@click.option("--output", required=True, metavar="DOLLARS", help="A million tokens of answers.")
@json_option
def set_price(model: str, as_json: bool, **dollars: str | None) -> None:
    """Set the price of a base model, for requests from now on."""
    with api() as server:
        show([server.put(route("prices", model), dollars)], COLUMNS, as_json)


@price_group.command("remove")
@click.argument("model")
def remove_price(model: str) -> None:
    """Let a base model cost nothing from now on."""
    with api() as server:
        server.delete(route("prices", model))
    click.echo(f"{model} costs nothing now")
