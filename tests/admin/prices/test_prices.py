"""Prices over real HTTP: dollars a million tokens, exact to the micro-dollar."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.queries import catalog_generation, load_catalog
from store.records import Price
from tests.admin.audit.test_audit import entries
from tests.admin.conftest import Plane, write_model
from tests.admin.http.test_routes import problem
from tests.scale import scaled

MOST = 10**12


async def add_model(plane: Plane, name: str, digit: str) -> None:
    write_model(plane.store, digit * 64)
    answer = await plane.client.post("models", json={"name": name, "digest": digit * 64})
    assert answer.status_code == 201, answer.text


def money(view: dict[str, Any]) -> tuple[str, str, str]:
    return view["input"], view["cached_input"], view["output"]


async def test_a_price_is_set_listed_and_removed(plane: Plane, base: str):
    assert problem(await plane.client.get("prices/tiny"), 404)["code"] == "price_not_found"
    async with plane.database.acquire() as connection:
        before = await catalog_generation(connection)
    body = {"input": "2.50", "cached_input": "1.25", "output": 10}
    answer = await plane.client.put("prices/tiny", json=body)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert (made["model"], *money(made)) == ("tiny", "2.50", "1.25", "10.00")
    assert (await plane.client.get("prices/tiny")).json() == made
    async with plane.database.acquire() as connection:
        catalog = await load_catalog(connection)
    assert catalog.generation > before
    assert catalog.prices == (Price("tiny", 2_500_000, 1_250_000, 10_000_000),)

    changed = await plane.client.put("prices/tiny", json={"input": 0.000001, "output": 0})
    assert money(changed.json()) == ("0.000001", "0.000001", "0.00")
    await add_model(plane, "other", "c")
    await plane.client.put("prices/other", json={"input": "1", "output": "1"})
    page = (await plane.client.get("prices", params={"limit": 1})).json()
    assert ([price["model"] for price in page["data"]], page["has_more"]) == (["other"], True)
    page = (await plane.client.get("prices", params={"limit": 1, "after": "other"})).json()
    assert (page["data"], page["has_more"]) == ([changed.json()], False)

    anything = {"if-match": "*"}
    assert (await plane.client.delete("prices/tiny", headers=anything)).json()["id"] == "tiny"
    problem(await plane.client.get("prices/tiny"), 404)
    assert problem(await plane.client.delete("prices/tiny"), 404)["code"] == "price_not_found"
    actions = [each.action for each in await entries(plane.database) if each.object == "tiny"]
    assert actions == ["model.create", "price.create", "price.update", "price.delete"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"color": 1}, "color"),
        ({"output": None}, "output"),
        ({"input": -1}, "input"),
        ({"input": "1000000.000001"}, "input"),
        ({"output": "0.0000001"}, "output"),
        ({"output": "Infinity"}, "output"),
        ({"output": "1_0"}, "output"),
        ({"output": [1]}, "output"),
        ({"cached_input": "2.000001"}, "cached_input"),
        ({"cached_input": "1e-7"}, "cached_input"),
    ],
)
async def test_prices_that_make_no_sense_are_refused_by_name(
    plane: Plane, base: str, change: dict[str, Any], named: str
):
    body = {"input": 2, "output": 3} | change
    refused = problem(await plane.client.put("prices/tiny", json=body), 400)
    assert named in f"{refused['param']} {refused['message']}"
    problem(await plane.client.get("prices/tiny"), 404)


@settings(
    max_examples=scaled(20, 300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    paid=st.integers(0, MOST),
    cached=st.none() | st.integers(0, MOST),
    output=st.integers(0, MOST),
    as_number=st.booleans(),
)
async def test_prices_are_exact(
    plane: Plane, base: str, paid: int, cached: int | None, output: int, as_number: bool
):
    """To the micro-dollar, as text and as JSON numbers; a cached token never costs more."""

    def told(micro: int) -> str:
        text = f"{Decimal(micro).scaleb(-6):f}"
        return text if as_number else f'"{text}"'

    fields = {"input": paid, "cached_input": cached, "output": output}
    texts = {name: told(micro) for name, micro in fields.items() if micro is not None}
    body = "{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}"
    answer = await plane.client.put("prices/tiny", content=body)
    if cached is not None and cached > paid:
        assert problem(answer, 400)["param"] == "cached_input"
        return
    assert answer.status_code == 200, answer.text
    expected = (paid, paid if cached is None else cached, output)
    shown = money(answer.json())
    assert tuple(int(Decimal(text).scaleb(6)) for text in shown) == expected
    async with plane.database.acquire() as connection:
        (price,) = (await load_catalog(connection)).prices
    assert (price.input, price.cached_input, price.output) == expected
