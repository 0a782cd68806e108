"""Texts encoded in slices have the tokens of the whole text, for every kind of tokenizer."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from gateway.exceptions import InvalidRequest
from gateway.text import sliced_encoder
from gateway.text.sliced_encoder import MAX_SLICE_CHARS, Kept, SlicedEncoder
from tests.workers.importer.test_tokenizer_parity import sentencepiece_metadata, smollm
from workers.importer.gguf_tokenizer import build_tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
FROM_THE_RIGHT = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}{1,3}(?=(\p{N}{3})*(?!\p{N}))")
"""Digits in groups of three that are counted from the right, as some tokenizers have them."""
SPECIALS = [AddedToken(text, special=True) for text in ("<s>", "<|im_end|>")]
SCRAPS = (
    *("hello ", "world", " the parcel", "is", " lost", "ing", "a", "b", "aaaa", "ab", "it's"),
    *(" ", "  ", "    ", "\n", "\r\n", "\n\n\n", "\t", "\u00a0", "\u2003"),
    *("1", "23", "4567", "3.14", "-", "=====", "...", "!?", "<s>", "<|im_end|>", "<|im_", "|>"),
    *(
        "é",
        "e\u0301",
        "\u0301\u0327",
        "ﷺ",
        "ß",
        "İ",
        "漢",
        "字字",
        "日本語。",
        "龘",
        "한국어",
        "ไทย",
    ),
    *("🎉", "👩\u200d🚀", "🏴", "\U0001f1e9\U0001f1ea", "\u200b", "\x00", "\ufffd"),
)
CORPUS = [
    "hello world, the parcel is lost and it's 2024   again\n\n\n",
    "aaaa aaaaaaaa abab ababab ====== ======== ....\n    if x == 12345:\n        return 'é'",
    "漢字と日本語。漢字 字字 日本語 한국어 ไทย 🎉🎉 👩\u200d🚀 e\u0301é",
] * 20


def byte_level(pattern: str, **options: Any) -> Tokenizer:
    tokenizer: Any = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def normalised() -> Tokenizer:
    tokenizer: Any = byte_level(QWEN)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def sentencepiece(normalizer: Any) -> Tokenizer:
    """As Llama 2's and Gemma's: spaces become U+2581, and there are no words."""
    tokenizer: Any = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer: Any = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", *SPECIALS, *(f"<0x{n:02X}>" for n in range(256))]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizer
    return tokenizer


def unigram(pre_tokenizer: Any) -> Tokenizer:
    tokenizer: Any = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer: Any = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


MARKS = normalizers.Replace(" ", "▁")
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "smollm": smollm,
    "gpt-2": lambda: byte_level(GPT2),
    "llama 3": lambda: byte_level(LLAMA3, ignore_merges=True),
    "qwen": normalised,
    "digits from the right": lambda: byte_level(FROM_THE_RIGHT),
    "gemma": lambda: sentencepiece(MARKS),
    "gemma of a gguf": lambda: build_tokenizer(sentencepiece_metadata()),
    "llama 2": lambda: sentencepiece(normalizers.Sequence([normalizers.Prepend("▁"), MARKS])),
    "unigram": lambda: unigram(pre_tokenizers.Metaspace()),
    "unigram without words": lambda: unigram(pre_tokenizers.Metaspace(split=False)),
}


@cache
def made(name: str) -> Tokenizer:
    return TOKENIZERS[name]()


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def any_text(rng: random.Random, num_scraps: int) -> str:
    """Scraps in a random order, with runs of one of them."""
    scraps: list[str] = []
    while len(scraps) < num_scraps:
        num = rng.choice([1] * 20 + [rng.randrange(200)])
        scraps += [rng.choice(SCRAPS)] * num
    return "".join(scraps)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many joints in a text that is short enough for many examples."""
    monkeypatch.setattr(sliced_encoder, "SLICE_CHARS", 512)
    monkeypatch.setattr(sliced_encoder, "MIN_SLICE_CHARS", 256)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_those_of_the_whole_text(name: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng = random.Random(seed)
        tokenizer, text = made(name), any_text(rng, rng.randrange(3000))
        encoder, tokens = SlicedEncoder(tokenizer), whole(tokenizer, text)
        assert encoder.encode(text) == tokens
        most = rng.randrange(len(tokens) + 2)
        first = encoder.encode(text, most)
        assert first == tokens[: len(first)] and len(first) >= min(len(tokens), most + 1)
        assert encoder.encode_part(text, Kept(most, "right")) == tokens[:most]
        assert encoder.encode_part(text, Kept(most, "left")) == tokens[max(0, len(tokens) - most) :]

    check()


RUNS = {
    "letters": "a" * 40_001,
    "spaces": "x" + " " * 40_003 + "x",
    "spaces before a line's end": (" " * 20_001 + "\n") * 2,
    "lines": "\r\n" * 20_001,
    "digits": "12345" * 8_001,
    "three tokens each": "龘" * 20_001,
    "letters without spaces": "漢字日本語" * 5_001,
    "marks": "e" + "\u0301" * 20_001,
    "specials": "<s>" * 10_001,
    "words": "the parcel is lost " * 3_001,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_runs_longer_than_a_slice_are_exact(name: str, run: str) -> None:
    text, tokenizer = f"so: {RUNS[run]} end", made(name)
    assert SlicedEncoder(tokenizer).encode(text) == whole(tokenizer, text)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("digits from the right", marks=pytest.mark.full),
        *("unigram", "unigram without words"),
    ],
)
def test_a_run_that_cannot_be_divided_is_refused(name: str) -> None:
    """By name: it is never encoded differently."""
    tokenizer = made(name)
    text = "12345" * (MAX_SLICE_CHARS // 5 + 1)
    with pytest.raises(InvalidRequest) as refusal:
        SlicedEncoder(tokenizer).encode(text)
    assert refusal.value.code == "text_indivisible"
    assert SlicedEncoder(tokenizer).encode(text[:MAX_SLICE_CHARS])


def test_other_threads_run_while_a_slice_is_encoded() -> None:
    """As the event loop's thread must. The machine may be busy, so that one of three tries is
    enough."""
    encoder = SlicedEncoder(smollm())
    text = "".join(random.Random(0).choices(SCRAPS, k=200_000))
    assert any(median_delay(partial(encoder.encode, text)) < 0.005 for _ in range(3))


def median_delay(work: Callable[[], object]) -> float:
    """Seconds from one turn of this thread to the next while another thread does the work."""
    thread = threading.Thread(target=work)
    delays: list[float] = []
    thread.start()
    while thread.is_alive():
        began = time.perf_counter()
        time.sleep(0.001)
        delays.append(time.perf_counter() - began)
    return statistics.median(delays)
