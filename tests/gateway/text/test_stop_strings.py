"""The incremental search for stop strings equals a naive one over the whole text, however cut."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.parsers.stopping import StopStrings

letters = st.text(alphabet="abé", max_size=24)
stops = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(pieces=st.lists(letters, max_size=8), stops=stops)
def test_equals_the_naive_search(pieces: list[str], stops: list[str]) -> None:
    search = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += search.push(piece)
        if search.matched is not None:
            break
        assert not any(stop in shown for stop in stops)
    else:
        shown += search.flush()
    assert (shown, search.matched) == oracle("".join(pieces), stops)


@given(pieces=st.lists(letters, max_size=8), stops=stops)
def test_holds_back_no_more_than_it_must(pieces: list[str], stops: list[str]) -> None:
    search = StopStrings(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += search.push(piece)
        if search.matched is not None:
            return
        held = text[len(shown) :]
        possible = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert len(held) == max(possible, default=0)


def test_a_stop_across_pieces_is_not_shown() -> None:
    search = StopStrings(["STOP"])
    assert [search.push(piece) for piece in ("go ST", "ILL ST", "O", "P on")] == [
        "go ",
        "STILL ",
        "",
        "",
    ]
    assert search.matched == "STOP"
