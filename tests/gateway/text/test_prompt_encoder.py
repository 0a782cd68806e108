"""Prompts encoded by pieces are as the tokenizer encodes them whole."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from gateway.text.long_texts import LongTexts
from gateway.text.prompt_encoder import MAX_PIECES, PIECE_CHARS, PromptEncoder, TokenizerFile
from tests.workers.importer.test_tokenizer_parity import sentencepiece_metadata, smollm
from workers.importer.gguf_tokenizer import build_tokenizer

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
FIRST = pre_tokenizers.Metaspace(prepend_scheme="first")


def special(text: str, **options: Any) -> AddedToken:
    return AddedToken(text, special=True, **options)


def with_added(
    added: list[AddedToken],
    pre_tokenizer: Any = BYTE_LEVEL,
    normalizer: Any = None,
) -> Tokenizer:
    """Letters and pairs of them, with these tokens."""
    letters = sorted({*pre_tokenizers.ByteLevel.alphabet(), "▁"})
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("▁", "a"), ("a", "a")]
    words = [*letters, *("".join(pair) for pair in merges)]
    tokenizer: Any = Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer


TURNS = [special("<|s|>"), special("<|e|>")]
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "smollm": smollm,
    "gemma-like": lambda: build_tokenizer(sentencepiece_metadata()),
    "plain": lambda: with_added(TURNS),
    "one holds another": lambda: with_added([*TURNS, special("<|e|><|s|>"), special("|s|")]),
    "one ends as another begins": lambda: with_added([*TURNS, special("a<|s"), special("|>a")]),
    "not special": lambda: with_added([*TURNS, AddedToken("a<", normalized=False)]),
    "takes in spaces": lambda: with_added(
        [special("<|s|>", rstrip=True), special("<|e|>", lstrip=True), special("<|x|>")]
    ),
    "whole words": lambda: with_added([*TURNS, special("ab", single_word=True)]),
    "normalized": lambda: with_added(
        [*TURNS, AddedToken("ab", normalized=True), AddedToken("<|", normalized=True)],
        normalizer=normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()]),
    ),
    "prepended": lambda: with_added(TURNS, normalizer=normalizers.Prepend("▁")),
    "first word": lambda: with_added(TURNS, pre_tokenizer=FIRST),
}
PARTED = {
    *("smollm", "gemma-like", "plain", "takes in spaces", "normalized", "prepended"),
    "one ends as another begins",  # At <|e|>, not at <|s|>.
}
SCRAPS = ["<|s|>", "<|e|>", "<|x|>", "<|", "|>", "s|>", "a", "b", "c", " ", "  ", "\n", "A", "é"]
MORE = {
    "smollm": ["<|im_start|>", "<|im_end|>", "user", "<|im_"],
    "gemma-like": ["<bos>", "<eos>", "<b>", "\n\n", "the"],
}


@cache
def made(name: str) -> Tokenizer:
    return TOKENIZERS[name]()


def file_of(tokenizer: Tokenizer) -> TokenizerFile:
    return msgspec.json.decode(tokenizer.to_str(), type=TokenizerFile)


def encoder(tokenizer: Tokenizer, **options: int) -> PromptEncoder:
    """Its template writes all the special tokens that there are."""
    added = tokenizer.get_added_tokens_decoder().values()
    template = "".join(f"{{{{ '{token.content}' }}}}" for token in added if token.special)
    return PromptEncoder(tokenizer, file_of(tokenizer), template, LongTexts(), **options)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_ids_are_those_of_the_whole_text(name: str, seed: int) -> None:
    """Whatever is remembered of texts before, and forgotten."""
    rng = random.Random(seed)
    tokenizer = made(name)
    prompts = encoder(tokenizer, max_chars=rng.choice([0, 20 * PIECE_CHARS, 10**6]))
    scraps = SCRAPS + 2 * MORE.get(name, [])
    for _ in range(12):
        text = "".join(rng.choices(scraps, k=rng.randrange(20)))
        assert asyncio.run(prompts.encode(text, rng.choice("ab"))) == whole(tokenizer, text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_are_remembered_where_they_do_not_depend_on_each_other(name: str) -> None:
    tokenizer = made(name)
    prompts = encoder(tokenizer)
    turn = {"smollm": "<|im_end|>", "gemma-like": "<eos>", "takes in spaces": "<|x|>"}
    text = f"abc{turn.get(name, '<|e|>')}a b"
    assert asyncio.run(prompts.encode(text, "tenant")) == whole(tokenizer, text)
    assert prompts.num_chars == (2 * PIECE_CHARS + 6 if name in PARTED else 0)


def test_what_is_remembered_is_bounded() -> None:
    """By its text and what each piece takes beside it; none that is very long crowds all out."""
    tokenizer = made("plain")
    prompts = encoder(tokenizer, max_chars=40 * PIECE_CHARS)
    for number in range(200):
        text = f"{number}<|s|>" + "a" * number
        assert asyncio.run(prompts.encode(text, "tenant")) == whole(tokenizer, text)
        assert prompts.num_chars <= 40 * PIECE_CHARS
    assert prompts.num_chars > 36 * PIECE_CHARS
    before = prompts.num_chars
    asyncio.run(prompts.encode("a" * 3 * PIECE_CHARS, "tenant"))
    assert prompts.num_chars == before


def test_long_pieces_are_tokenised_beside_the_others() -> None:
    """In a thread: the loop goes on meanwhile."""
    tokenizer = made("smollm")
    prompts = encoder(tokenizer)
    text = "<|im_start|>" + "some words of a long document " * 20_000

    async def run() -> tuple[list[int], int]:
        encoding = asyncio.create_task(prompts.encode(text, "tenant"))
        num_turns = 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        return encoding.result(), num_turns

    ids, num_turns = asyncio.run(run())
    assert ids == whole(tokenizer, text)
    assert num_turns > 5


def test_a_text_of_very_many_pieces_is_not_parted() -> None:
    """It would hold up the loop, and push out what others have had remembered."""
    tokenizer = made("plain")
    prompts = encoder(tokenizer)
    text = "".join(f"{number}<|s|>" for number in range(MAX_PIECES + 1))
    assert asyncio.run(prompts.encode(text, "tenant")) == whole(tokenizer, text)
    assert prompts.num_chars == 0


def test_another_domain_is_told_nothing() -> None:
    """What is known of one is not found by another."""
    prompts = encoder(made("plain"))
    for domain in ("a", "b", "a"):
        asyncio.run(prompts.encode("abc<|s|>", domain))
    assert prompts.num_chars == 2 * (PIECE_CHARS + 3)


def test_a_text_is_parted_at_what_the_template_writes() -> None:
    """And at no other special token, of which there may be thousands."""
    tokenizer = with_added([*TURNS, *(special(f"<unused{number}>") for number in range(3000))])
    file = file_of(tokenizer)
    template = "{{ '<|s|>' + m.content + '<|e|>' }}"
    prompts = PromptEncoder(tokenizer, file, template, LongTexts())
    text = "<|s|>a<unused7>b<|e|>c"
    assert asyncio.run(prompts.encode(text, "tenant")) == whole(tokenizer, text)
    assert prompts.num_chars == 2 * PIECE_CHARS + len("a<unused7>b") + len("c")
    unparted = PromptEncoder(tokenizer, file, "", LongTexts())
    assert asyncio.run(unparted.encode(text, "tenant")) == whole(tokenizer, text)
