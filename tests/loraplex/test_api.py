"""What the command line reports of an answer beside its body."""

from __future__ import annotations

import httpx
import pytest

from loraplex.api import Api


def answered(api: Api, text: str) -> None:
    """Makes a client get this text, whatever it asks for."""
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=text))
    api._client = httpx.Client(base_url="http://admin", transport=transport)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line(separator: str) -> None:
    """JSON may contain the other characters at which Python splits lines."""
    text = f"a{separator}b"
    with Api("http://admin", "lpx_key") as api:
        answered(api, f"{text}\n\n{text}")
        assert list(api.lines("/admin/v1/audit/export")) == [text, "", text]
        answered(api, f'data: {{"a": "{text}"}}\n\ndata: [DONE]\n\n')
        assert list(api.chat("bot", [])) == [{"a": text}]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (None, ""),
        ("0", ""),
        ("1", "1 gateway may not"),
        ("12", "12 gateways may not"),
        ("unknown", "some gateways may not"),
    ],
)
def test_gateways_that_may_not_use_a_change_are_named(
    header: str | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {} if header is None else {"loraplex-gateways-behind": header}
    answer = httpx.MockTransport(lambda _: httpx.Response(200, json={"a": 1}, headers=headers))
    caplog.set_level("INFO", "loraplex")
    with Api("http://admin", "lpx_key") as api:
        api._client = httpx.Client(base_url="http://admin", transport=answer)
        assert api.delete("/keys/x") == {"a": 1}
    # httpx has log lines of its own.
    told = [each.getMessage() for each in caplog.records if each.name.startswith("loraplex")]
    assert len(told) == bool(said) and all(said in line for line in told)
