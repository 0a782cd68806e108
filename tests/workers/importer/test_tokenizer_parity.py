"""Tokenizers rebuilt from GGUF against their published rules, written out here a second time."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.workers.real_model import demo_metadata
from workers.importer import ImportRefused
from workers.importer.gguf_tokenizer import build_tokenizer, build_tokenizer_config

GPT2_WORDS = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)

TEXTS = [
    "Hello, world!",
    "a  12",
    "costs  $3.50,   or 12345 in   2024",
    "x=1\n\n  y = 22\n\tz\t 3",
    "  leading and trailing  ",
    "it's they'll I'd we've DON'T",
    "Grüße, naïve café, 你好世界, привет, 🎉👩‍🚀",
    "٣٤٥ and ½ and ² and Ⅷ",
    "def f(x):\n    return x**2  # 100%\n\n\n",
    " \u00a0 \u2003 \r\n\r\n 1 \r 2",
    "",
]


@cache
def smollm() -> Tokenizer:
    return build_tokenizer(demo_metadata())


@cache
def ranks() -> dict[tuple[str, str], int]:
    merges: Any = demo_metadata()["tokenizer.ggml.merges"]
    return {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}


@cache
def vocabulary() -> dict[str, int]:
    tokens: Any = demo_metadata()["tokenizer.ggml.tokens"]
    return {token: index for index, token in enumerate(tokens)}


@cache
def byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def published_smollm(text: str) -> list[int]:
    """Each digit alone, GPT-2 words between them, bytes, then the best merge until none is left."""
    pieces = [p for p in regex.split(r"(?V1)(\p{N})", text) if p]
    words = [word for piece in pieces for word in GPT2_WORDS.findall(piece)]
    assert "".join(words) == text
    ids = []
    for word in words:
        parts = [byte_letters()[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: ranks().get(pair, 1 << 30))
            if best not in ranks():
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        ids += [vocabulary()[part] for part in parts]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_smollm_equals_the_published_rule(text: str) -> None:
    assert smollm().encode(text).ids == published_smollm(text)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("ab zA1 29\n\t'.,!é你²٣🎉<|"), max_size=40))
def test_smollm_equals_the_published_rule_on_any_text(text: str) -> None:
    assert smollm().encode(text).ids == published_smollm(text)
    assert smollm().decode(smollm().encode(text).ids) == text


def test_smollm_digits_stand_alone_after_double_spaces() -> None:
    tokens = smollm().encode("in  2024").tokens
    assert tokens == ["in", "ĠĠ", "2", "0", "2", "4"]


def test_specials_are_one_token_and_hidden_on_request() -> None:
    ids = smollm().encode("<|im_start|>user\nHi<|im_end|>\n").ids
    assert ids[0] == 1 and 2 in ids
    assert smollm().decode(ids, skip_special_tokens=True) == "user\nHi\n"
    assert smollm().decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_no_bos_is_added_where_the_file_says_so() -> None:
    config = build_tokenizer_config(demo_metadata())
    assert config["add_bos_token"] is False
    assert config["bos_token"] == "<|im_start|>" and config["eos_token"] == "<|im_end|>"
    assert smollm().encode("Hi").ids == published_smollm("Hi")


def test_chat_template_renders_and_matches_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    smollm().save(str(tmp_path / "tokenizer.json"))
    template: Any = demo_metadata()["tokenizer.chat_template"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi  12"}],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert isinstance(text, str)
    assert text.endswith("<|im_start|>user\nHi  12<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(text)["input_ids"] == smollm().encode(text).ids


LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A small Gemma-like vocabulary: specials, runs, bytes, then pieces by falling score."""
    fixed = [
        ("<pad>", 3),
        ("<eos>", 3),
        ("<bos>", 3),
        ("<unk>", 2),
        ("\n\n", 4),
        ("  ", 4),
        ("<b>", 4),
    ]
    byte_pieces = [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    words = [
        "th",
        "the",
        SPACE + "t",
        "he",
        SPACE + "the",
        "an",
        SPACE + "an",
        "nd",
        "and",
        "aa",
        "aaa",
    ]
    pieces = [(piece, 1) for piece in [*words, SPACE, "\n", *LETTERS]]
    table = [*fixed, *byte_pieces, *pieces]
    first = len(fixed) + len(byte_pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in table],
        "tokenizer.ggml.token_type": [kind for _, kind in table],
        "tokenizer.ggml.scores": [float(min(0, first - i)) for i in range(len(table))],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    } | changes


def published_sentencepiece(metadata: dict[str, Any], text: str) -> list[str]:
    """User-defined symbols first, longest first; then the neighbours that make the best piece."""
    table = list(
        zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.token_type"],
            metadata["tokenizer.ggml.scores"],
            strict=True,
        )
    )
    scores = {token: score for token, kind, score in table if kind == 1}
    symbols = sorted(
        (token for token, kind, _ in table if kind in (2, 3, 4)), key=len, reverse=True
    )
    tokens: list[str] = []
    for part in re.split("(" + "|".join(map(re.escape, symbols)) + ")", text):
        if part in symbols:
            tokens.append(part)
            continue
        pieces = list(part.replace(" ", SPACE))
        while pairs := [(a + b, i) for i, (a, b) in enumerate(itertools.pairwise(pieces))]:
            piece, at = max(pairs, key=lambda pair: (scores.get(pair[0], -1e9), -pair[1]))
            if piece not in scores:
                break
            pieces[at : at + 2] = [piece]
        for piece in pieces:
            known = piece in scores
            tokens += [piece] if known else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return tokens


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("athend \n<b>é🎉"), max_size=30))
def test_sentencepiece_equals_the_published_rule(text: str) -> None:
    metadata = sentencepiece_metadata()
    tokenizer = build_tokenizer(metadata)
    encoding = tokenizer.encode(text)
    assert encoding.tokens == ["<bos>", *published_sentencepiece(metadata, text)]
    assert tokenizer.decode(encoding.ids) == text


def test_llama_puts_a_space_in_front_and_takes_it_away() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": True}))
    encoding = tokenizer.encode("the cat")
    assert encoding.tokens == ["<bos>", SPACE + "the", SPACE, "c", "a", "t"]
    assert tokenizer.decode(encoding.ids) == "the cat"


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("llama-bpe", "it's  12345", ["it", "'s", "Ġ", "Ġ", "123", "45"]),
        ("qwen2", "it's  123", ["it", "'s", "Ġ", "Ġ", "1", "2", "3"]),
        ("gpt-2", "it's  123", ["it", "'s", "Ġ", "Ġ123"]),
        ("smollm", "it's  123", ["it", "'s", "ĠĠ", "1", "2", "3"]),
    ],
)
def test_words_of_each_pre_tokenizer(pre: str, text: str, words: list[str]) -> None:
    metadata = demo_metadata() | {"tokenizer.ggml.pre": pre}
    split = build_tokenizer(metadata).pre_tokenizer
    assert split is not None
    assert [word for word, _ in split.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.pre", "tekken-next"),
        ("tokenizer.ggml.pre", None),
        ("tokenizer.ggml.model", "plamo"),
        ("tokenizer.ggml.merges", ["zzzzqq qqzz"]),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ImportRefused, match=re.escape(key)):
        build_tokenizer(demo_metadata() | {key: value})
