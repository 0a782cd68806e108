"""Builds tokenizer.json from GGUF metadata.

The metadata key `tokenizer.ggml.model` selects the kind of tokenizer, and `tokenizer.ggml.pre`
selects the pre-tokenizer. Each pre-tokenizer is the same as in the tokenizer.json that the model's
family publishes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from workers.importer.canonical import ImportRefused

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Numbers of the kinds of tokens in `tokenizer.ggml.token_type`."""

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN2_WORDS = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, _byte_level(use_regex=False)])


def _digits() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: _byte_level(use_regex=True),
    "llama-bpe": lambda: _split(LLAMA3_WORDS),
    "qwen2": lambda: _split(QWEN2_WORDS),
    "smollm": _digits,
}
"""Functions that build the pre-tokenizers of byte-level BPE models, by the value of
`tokenizer.ggml.pre`."""


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Returns the tokenizer. Raises ImportRefused if the metadata names an unsupported tokenizer
    model or pre-tokenizer, or lists a token twice."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    if len(set(tokens)) != len(tokens):
        raise ImportRefused("tokenizer.ggml.tokens names a token twice")
    pre = metadata.get("tokenizer.ggml.pre")
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2" if pre in PRE_TOKENIZERS:
            tokenizer = _byte_level_bpe(metadata, pre)
        case "llama" if pre in (None, "default"):
            tokenizer = _sentencepiece_bpe(metadata)
        case "gpt2":
            raise ImportRefused(
                f"tokenizer.ggml.pre = {pre!r}; allowed: {', '.join(PRE_TOKENIZERS)}"
            )
        case "llama":
            raise ImportRefused(f"tokenizer.ggml.pre = {pre!r}; allowed: 'default'")
        case other:
            raise ImportRefused(f"tokenizer.ggml.model = {other!r}; allowed: 'gpt2', 'llama'")
    tokenizer.add_tokens(_added_tokens(metadata))
    _add_template(tokenizer, metadata)
    return tokenizer


def build_tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(metadata, "bos"),
        "add_eos_token": _adds(metadata, "eos"),
    }
    for kind, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{kind}_token"] = tokens[token_id]
    return config


def _byte_level_bpe(metadata: dict[str, Any], pre: str) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    is_llama = pre == "llama-bpe"
    tokenizer = Tokenizer(_bpe(vocab=vocab, merges=merges, ignore_merges=is_llama))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(metadata: dict[str, Any]) -> Tokenizer:
    """Returns a BPE tokenizer that encodes spaces as U+2581 and unknown characters as bytes.
    Llama's tokenizer also prepends a space to the text, and Gemma's does not."""
    tokens = metadata["tokenizer.ggml.tokens"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        _bpe(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(metadata),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    marks = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), marks])
        decoding.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = marks
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _bpe(**options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    except Exception as error:  # tokenizers raises plain Exception
        raise ImportRefused(f"tokenizer.ggml.merges: {error}") from error


def _merges(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the BPE merges that give the same tokens as SentencePiece. There is one merge for
    each split of a token into two other tokens. The merges are sorted by the score of the token
    that they form, with the highest score first.

    All tokens of a merge are normal tokens, because SentencePiece never joins control or
    user-defined tokens to other tokens, and never forms such a token by joining.
    """
    scores = {
        token: score
        for token, score, kind in zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
        if kind == NORMAL
    }
    merges: list[tuple[str, str]] = []
    for piece in sorted(scores, key=scores.__getitem__, reverse=True):
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [pair for pair in splits if pair[0] in scores and pair[1] in scores]
        merges += sorted(pairs, key=lambda pair: (scores[pair[0]], scores[pair[1]]), reverse=True)
    return merges


def _added_tokens(metadata: dict[str, Any]) -> list[AddedToken]:
    """Returns the tokens that the tokenizer recognises in a text before it splits the text. Control
    tokens and the unknown token are special tokens."""
    return [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(
            metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True
        )
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _adds(metadata: dict[str, Any], kind: str) -> bool:
    """Returns whether the tokenizer adds the token `kind` (`bos` or `eos`) to each text. If the
    file does not say, tokenizers of SentencePiece and Llama 3 add `bos`, and none adds `eos`."""
    families = ("llama", "llama-bpe")
    names = (metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre"))
    default = kind == "bos" and any(name in families for name in names)
    return bool(metadata.get(f"tokenizer.ggml.add_{kind}_token", default))


def _add_template(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    pieces = ["$A"]
    special: list[tuple[str, int]] = []
    for kind, place in (("bos", 0), ("eos", len(pieces) + 1)):
        token_id = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if _adds(metadata, kind) and token_id is not None:
            token = metadata["tokenizer.ggml.tokens"][token_id]
            pieces.insert(place, token)
            special.append((token, token_id))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=pieces, pair=None, special_tokens=special
        )
