"""Equal keys exactly for equal identities, however the fields' texts are cut."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.page_key import PAGE_TOKENS, PageHasher, page_keys


class Identity(NamedTuple):
    model: str
    domain: str
    adapter: str | None
    salt: str
    layout: str
    parent: bytes | None
    tokens: tuple[int, ...]

    @property
    def key(self) -> bytes:
        *fields, parent, tokens = self
        model, domain, adapter, salt, layout = fields
        hasher = PageHasher(model=model, domain=domain, adapter=adapter, salt=salt, layout=layout)
        return hasher.key(parent, tokens)


text = st.text(alphabet="ab", max_size=3)
identities = st.builds(
    Identity,
    model=text,
    domain=text,
    adapter=st.none() | text,
    salt=text,
    layout=text,
    parent=st.none() | st.binary(max_size=2),
    tokens=st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 2), max_size=3).map(tuple),
)


@given(st.lists(identities, min_size=2, max_size=30))
def test_equal_key_means_equal_identity(items: list[Identity]) -> None:
    assert len({item.key for item in items}) == len(set(items))


@given(identities, st.integers(0, 5), st.integers(0, 5))
def test_text_moved_between_neighbouring_fields_changes_the_key(
    item: Identity, field: int, cut: int
) -> None:
    """A salt that looks like an adapter's digest is not that adapter."""
    moved = list(item)
    field %= 4
    left, right = str(moved[field] or ""), str(moved[field + 1] or "")
    joined = left + right
    moved[field], moved[field + 1] = joined[:cut], joined[cut:]
    other = Identity(*moved)
    assert (other.key == item.key) == (other == item)


def test_base_is_no_adapter_name() -> None:
    base = PageHasher(model="m", domain="d")
    for name in ("", "base"):
        assert base.key(None, [1]) != PageHasher(model="m", domain="d", adapter=name).key(None, [1])


def test_keys_chain_and_extend_to_full_pages_only() -> None:
    hasher = PageHasher(model="m", domain="d")
    tokens = list(range(3 * PAGE_TOKENS + 5))
    keys = page_keys(hasher, tokens)
    assert len(keys) == 3
    grown = page_keys(hasher, tokens[: PAGE_TOKENS + 1])
    assert grown == keys[:1]
    hasher.extend(grown, tokens)
    assert grown == keys
    changed = [99, *tokens[1:]]
    assert not set(page_keys(hasher, changed)) & set(keys)


def test_adapter_pages_may_follow_base_pages() -> None:
    base = PageHasher(model="m", domain="d")
    adapter = PageHasher(model="m", domain="d", adapter="sha256:1")
    tokens = list(range(2 * PAGE_TOKENS))
    keys = page_keys(base, tokens[:PAGE_TOKENS])
    adapter.extend(keys, tokens)
    assert keys[0] == page_keys(base, tokens)[0]
    assert keys[1] not in {page_keys(base, tokens)[1], page_keys(adapter, tokens)[1]}


def test_a_token_that_is_no_unsigned_32_bit_number_is_refused() -> None:
    with pytest.raises(OverflowError):
        PageHasher(model="m", domain="d").key(None, [-1])
