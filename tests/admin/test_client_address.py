"""The client's address, from what the server and a proxy's header give."""

from __future__ import annotations

import pytest

from web.request_head import address_prefix, client_address


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (None, None),
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1), "192.0.2.7"),
        (("2001:DB8:0::1", 1), "2001:db8::1"),
        (("fe80::1%eth0", 1), "fe80::1"),
        (("unknown", 0), None),
        (("192.0.2.7\nforged line", 0), None),
        (("1" * 70_000, 0), None),
    ],
)
def test_one_spelling_or_none(client: tuple[str, int] | None, expected: str | None) -> None:
    assert client_address({"client": client}) == expected


def test_one_subscriber_is_one_prefix() -> None:
    assert address_prefix("192.0.2.7") == "192.0.2.7"
    assert address_prefix("2001:db8::1") == address_prefix("2001:db8::ffff:1") == "2001:db8::/64"
    assert address_prefix(None) == "unknown"
