"""Dollars as people write them, to and from the whole numbers that are counted with.

What was spent is counted in pico-dollars; a price in micro-dollars for a million tokens, which is
as many pico-dollars a token.
"""

from __future__ import annotations

from decimal import Decimal

from admin.errors import Invalid

PICO = 12
"""Decimals of what is spent and of limits on it."""
MICRO = 6
"""Decimals of prices."""


def count_dollars(value: Decimal, decimals: int, most: int, field: str) -> int:
    """How many 10 ** -decimals of a dollar it is. Raises Invalid if they are not whole, negative,
    or more than `most` dollars."""
    if not value.is_finite() or not 0 <= value <= most:
        raise Invalid(f"{field} must be from 0 to {most} dollars", "invalid", field)
    rounded = value.quantize(Decimal(1).scaleb(-decimals))
    if rounded != value:
        raise Invalid(f"{field} has more than {decimals} decimals", "invalid", field)
    return int(rounded.scaleb(decimals))


def format_dollars(count: int | Decimal, decimals: int) -> str:
    """The exact sum with two decimals or as many as it has, such as 12.50 or 0.000125.

    count: whole, not negative, up to 28 digits.
    """
    whole, _, rest = f"{Decimal(count).scaleb(-decimals):.{decimals}f}".partition(".")
    return f"{whole}.{rest.rstrip('0'):0<2}"
