from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from store.records import BASE62, ApiKey, hash_key, new_key, parse_key

POSITIONS = st.integers(0, 65)


def test_a_new_key_parses_to_its_id():
    key = new_key()
    assert key.text.startswith(f"lpx_{key.id}_")
    assert len(key.text) == 4 + 12 + 1 + 43 + 6
    assert parse_key(key.text) == key.id
    assert new_key() != key


@given(POSITIONS, st.sampled_from(BASE62 + "_- \n\0é"))
def test_one_changed_character_is_noticed(position: int, character: str):
    text = new_key().text
    changed = text[:position] + character + text[position + 1 :]
    assert (parse_key(changed) is None) == (changed != text)


@given(st.text(max_size=80))
def test_junk_is_no_key(text: str):
    assert parse_key(text) is None
    assert parse_key("lpx_" + text) is None


@given(st.integers(0, 65))
def test_a_cut_or_longer_key_is_none(length: int):
    text = new_key().text
    assert parse_key(text[:length]) is None
    assert parse_key(text + text[: length + 1]) is None


def test_the_hash_depends_on_key_and_pepper():
    one, other = new_key().text, new_key().text
    assert len(hash_key(one, b"p")) == 32
    assert hash_key(one, b"p") == hash_key(one, b"p")
    assert len({hash_key(one, b"p"), hash_key(one, b"q"), hash_key(other, b"p")}) == 3


def test_a_key_lives_until_it_expires_or_is_revoked():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    later = now + timedelta(seconds=1)

    def key(**times: datetime) -> ApiKey:
        return ApiKey(id="x", tenant_id="t", hash=b"", scopes=frozenset(), **times)

    assert key().is_live(now)
    assert key(expires_at=later).is_live(now)
    assert not key(expires_at=later).is_live(later)
    assert not key(revoked_at=later).is_live(now)
