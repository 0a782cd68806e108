"""Equal keys exactly for equal identities, however the fields' texts are cut."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.page_key import PAGE_TOKENS, PageHasher
from tests.memory.holder import page_keys


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
        return hasher.key(0, parent, tokens)


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


@pytest.mark.full
def test_a_hundred_thousand_prompts_share_exactly_the_pages_of_equal_identity() -> None:
    """Every field from one small set of texts: a salt is another's adapter, group and model."""
    rng = random.Random(20)
    texts = ["", "a", "b", "ab", "base", "group:a", "tenant:a", "m:a"]
    prompts = [[rng.randrange(3)] * rng.randrange(PAGE_TOKENS, 60) for _ in range(12)]
    prompts += [[*prompt[:-1], 3] for prompt in prompts]
    key_of: dict[tuple[object, ...], bytes] = {}
    identity_of: dict[bytes, tuple[object, ...]] = {}
    num_pages = num_base = 0
    for _ in range(100_000):
        tokens = rng.choice(prompts)
        model, domain, salt, layout = (rng.choice(texts) for _ in range(4))
        adapter = rng.choice([None, *texts])
        activation = rng.choice([0, 0, rng.randrange(len(tokens))])
        hasher = PageHasher(
            model=model,
            domain=domain,
            adapter=adapter,
            activation=activation,
            salt=salt,
            layout=layout,
        )
        for index, key in enumerate(page_keys(hasher, tokens)):
            end = (index + 1) * PAGE_TOKENS
            is_base = adapter is None or end <= activation
            computed_by = None if is_base else (adapter, activation)
            identity = model, domain, salt, layout, computed_by, tuple(tokens[:end])
            assert key_of.setdefault(identity, key) == key
            assert identity_of.setdefault(key, identity) == identity
            num_pages += 1
            num_base += is_base
    assert num_base > 10_000
    assert len(key_of) < 0.9 * num_pages, "equal identities hardly occurred"


def test_base_is_no_adapter_name() -> None:
    base = PageHasher(model="m", domain="d")
    for name in ("", "base"):
        adapted = PageHasher(model="m", domain="d", adapter=name)
        assert base.key(0, None, [1]) != adapted.key(0, None, [1])


def test_keys_chain_and_extend_to_full_pages_only() -> None:
    hasher = PageHasher(model="m", domain="d")
    tokens = list(range(3 * PAGE_TOKENS + 5))
    keys = page_keys(hasher, tokens)
    assert len(keys) == 3
    grown = page_keys(hasher, tokens[: PAGE_TOKENS + 1])
    assert grown == keys[:1]
    hasher.extend(grown, tokens, len(tokens) // PAGE_TOKENS)
    assert grown == keys
    changed = [99, *tokens[1:]]
    assert not set(page_keys(hasher, changed)) & set(keys)


@pytest.mark.parametrize(
    ("activation", "num_shared"), [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2)]
)
def test_pages_wholly_before_the_activation_are_base_pages(
    activation: int, num_shared: int
) -> None:
    tokens = list(range(3 * PAGE_TOKENS))
    base = page_keys(PageHasher(model="m", domain="d"), tokens)
    hashers = [
        PageHasher(model="m", domain="d", adapter=adapter, activation=activation)
        for adapter in ("a", "b")
    ]
    one, other = (page_keys(hasher, tokens) for hasher in hashers)
    assert one[:num_shared] == other[:num_shared] == base[:num_shared]
    assert len({*one[num_shared:], *other[num_shared:], *base[num_shared:]}) == 3 * (3 - num_shared)


def test_a_page_activated_elsewhere_is_another_page() -> None:
    """The last occurrence of an invocation depends on what follows the page."""
    tokens = list(range(2 * PAGE_TOKENS))
    keys = [
        page_keys(PageHasher(model="m", domain="d", adapter="a", activation=position), tokens)
        for position in (16, 17, 20)
    ]
    assert len({key[0] for key in keys}) == 1
    assert len({key[1] for key in keys}) == 3


def test_a_token_that_is_no_unsigned_32_bit_number_is_refused() -> None:
    with pytest.raises(OverflowError):
        PageHasher(model="m", domain="d").key(0, None, [-1])
