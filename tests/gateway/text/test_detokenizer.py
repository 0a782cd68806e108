"""The incremental detokeniser says exactly what the tokenizer's own decode says."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from gateway.text.detokenizer import Spelling, UnsupportedDecoder
from gateway.text.long_texts import LongTexts
from gateway.text.template_process import TemplateProcesses
from gateway.text.tokenizer import ModelTokenizer
from tests.doubles import make_tokenizer

FALLBACK = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
]


def byte_fallback_tokenizer(folder: Path, *, strip: bool) -> None:
    """Gemma's and Mistral's kind: words with U+2581, and bytes for the rest."""
    words = ["▁", "▁hello", "wor", "ld", "▁▁", "é", "<0x4", "漢"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [*FALLBACK, decoders.Strip(" ", 1, 0)] if strip else FALLBACK
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.add_tokens([AddedToken("\n\n", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = tmp_path_factory.mktemp("byte-level")
    make_tokenizer(folder)
    return ModelTokenizer(folder, LongTexts(), TemplateProcesses())


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = tmp_path_factory.mktemp("byte-fallback")
    byte_fallback_tokenizer(folder, strip=False)
    return ModelTokenizer(folder, LongTexts(), TemplateProcesses())


@pytest.fixture(scope="module")
def stripping(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = tmp_path_factory.mktemp("stripping")
    byte_fallback_tokenizer(folder, strip=True)
    return ModelTokenizer(folder, LongTexts(), TemplateProcesses())


def in_pieces(tokenizer: ModelTokenizer, tokens: list[int], cuts: list[int], skip: bool) -> str:
    detokenizer = tokenizer.spelling.detokenizer(frozenset() if skip else None)
    text, start = "", 0
    for size in cuts:
        piece = detokenizer.push(tokens[start : start + size])
        piece.encode()  # no lone surrogate, no half character
        text += piece
        start += size
    return text + detokenizer.push(tokens[start:]) + detokenizer.flush()


def decode(tokenizer: ModelTokenizer, tokens: list[int], skip: bool) -> str:
    return asyncio.run(tokenizer.decode(tokens, domain="", skip_special_tokens=skip))


def encode(tokenizer: ModelTokenizer, text: str) -> list[int]:
    encoding = tokenizer.encode_many([text], domain="", add_special_tokens=False)
    return asyncio.run(encoding)[0]


ids = st.lists(st.integers(0, 275), max_size=40)
cuts = st.lists(st.integers(0, 4), max_size=20)


@given(tokens=ids, cuts=cuts, skip=st.booleans())
def test_byte_level_equals_decode(
    byte_level: ModelTokenizer, tokens: list[int], cuts: list[int], skip: bool
) -> None:
    assert in_pieces(byte_level, tokens, cuts, skip) == decode(byte_level, tokens, skip)


@given(text=st.text(max_size=20), cuts=cuts)
def test_byte_level_spells_any_text(byte_level: ModelTokenizer, text: str, cuts: list[int]) -> None:
    tokens = encode(byte_level, text)
    assert in_pieces(byte_level, tokens, cuts, True) == decode(byte_level, tokens, True)


@given(tokens=ids, cuts=cuts, skip=st.booleans())
def test_byte_fallback_equals_decode(
    byte_fallback: ModelTokenizer, tokens: list[int], cuts: list[int], skip: bool
) -> None:
    assert in_pieces(byte_fallback, tokens, cuts, skip) == decode(byte_fallback, tokens, skip)


@given(tokens=ids, cuts=cuts)
def test_an_answer_after_a_prompt_keeps_its_first_space(
    stripping: ModelTokenizer, tokens: list[int], cuts: list[int]
) -> None:
    prompt = [258]
    whole = decode(stripping, [*prompt, *tokens], True)
    before = decode(stripping, prompt, True)
    assert before + in_pieces(stripping, tokens, cuts, True) == whole


def test_a_character_is_shown_once_whole(byte_level: ModelTokenizer) -> None:
    tokens = encode(byte_level, "a🏴")
    detokenizer = byte_level.spelling.detokenizer()
    assert [detokenizer.push([token]) for token in tokens] == ["a", "", "", "", "🏴"]


def test_bytes_of_a_token_are_exact(byte_level: ModelTokenizer) -> None:
    tokens = encode(byte_level, "€")
    assert [byte_level.spelling.all[token] for token in tokens] == [b"\xe2", b"\x82", b"\xac"]


def test_an_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedDecoder, match="WordPiece"):
        Spelling(tokenizer, {"type": "WordPiece", "prefix": "##"})
