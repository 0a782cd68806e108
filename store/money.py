"""Converts dollars in decimal form to and from integers.

Spend is counted in pico-dollars. A price in micro-dollars per million tokens is the same number of
pico-dollars per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from store.errors import Invalid

PICO = 12
"""Decimal places, in dollars, of a pico-dollar, the unit of spend and of spend limits."""
MICRO = 6
"""Decimal places, in dollars, of a micro-dollar, the unit of prices."""


def count_dollars(value: Decimal, decimals: int, most: int, field: str) -> int:
    """Returns an amount in units of 10 ** -decimals dollars. Raises Invalid if it is negative, has
    more decimals, or is more than `most` dollars."""
    if not value.is_finite() or not 0 <= value <= most:
        raise Invalid(f"{field} must be from 0 to {most} dollars", "invalid", field)
    rounded = value.quantize(Decimal(1).scaleb(-decimals))
    if rounded != value:
        raise Invalid(f"{field} has more than {decimals} decimals", "invalid", field)
    return int(rounded.scaleb(decimals))


def format_dollars(count: int | Decimal, decimals: int) -> str:
    """Returns `count * 10**-decimals` with at least two decimals, such as 12.50 or 0.000125.

    `count` is a whole number from 0, with up to 28 digits.
    """
    whole, _, rest = f"{Decimal(count).scaleb(-decimals):.{decimals}f}".partition(".")
    return f"{whole}.{rest.rstrip('0'):0<2}"


def in_dollars(record: Any, names: Iterable[str], decimals: int) -> dict[str, str]:
    """Returns the record's fields `names` as formatted amounts in dollars, by field name."""
    return {name: format_dollars(getattr(record, name), decimals) for name in names}
