"""Decodes token ids to text incrementally, exactly and in linear time. Never returns a part of a
character.

Two kinds of decoders are supported. Any other decoder is refused with an error that names it. With
a byte-level decoder (GPT-2, Llama 3, Qwen, SmolLM), each token stands for bytes, and all bytes
together are decoded as UTF-8. With a byte-fallback decoder (Gemma, Mistral, Llama 2), each token
stands for text in which U+2581 is a space, except for `<0xNN>` tokens, each of which stands for one
byte. A run of byte tokens is decoded as UTF-8 if the whole run is valid, and otherwise becomes
replacement characters.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class UnsupportedDecoder(ValueError):
    """Error for a tokenizer with a kind of decoder that is not supported."""


class TokenBytes(dict[int, bytes]):
    """Table of the bytes for which each token id stands, computed at first use. Unknown ids have
    empty bytes."""

    def __init__(self, tokenizer: Tokenizer, spell: Callable[[str], bytes]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._spell = spell

    def __missing__(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        value = self[token] = b"" if text is None else self._spell(text)
        return value


class ByteLevelDetokenizer:
    """Decoder of tokens that stand for bytes. `spelled` must have empty bytes for the special
    tokens that are not shown."""

    def __init__(self, spelled: TokenBytes) -> None:
        self._spelled = spelled
        self._decode = Utf8Decoder("replace").decode

    def push(self, tokens: Iterable[int]) -> str:
        spelled = self._spelled
        return self._decode(b"".join([spelled[token] for token in tokens]))

    def flush(self) -> str:
        return self._decode(b"", True)


class ByteFallbackDetokenizer:
    """Decoder of tokens that stand for text. Holds back a run of byte tokens until it ends, because
    one invalid byte turns the whole run into replacement characters."""

    def __init__(self, spelled: TokenBytes, byte_tokens: dict[int, int]) -> None:
        self._spelled = spelled
        self._byte_tokens = byte_tokens
        self._run = bytearray()

    def push(self, tokens: Iterable[int]) -> str:
        pieces: list[str] = []
        for token in tokens:
            byte = self._byte_tokens.get(token)
            if byte is not None:
                self._run.append(byte)
            elif spelled := self._spelled[token]:
                pieces.append(self.flush())
                pieces.append(spelled.decode(errors="replace"))
        return "".join(pieces)

    def flush(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)


Detokenizer = ByteLevelDetokenizer | ByteFallbackDetokenizer
"""Incremental decoder of one answer. `push` returns the text that later tokens cannot change.
`flush` returns the text held back at the end, with replacement characters for an incomplete
character."""


class Spelling:
    """Mapping from a tokenizer's token ids to bytes and text."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        """`decoder` is the field `decoder` of tokenizer.json. Raises UnsupportedDecoder if its kind
        is not supported."""
        self._is_byte_level = _is_byte_level(decoder)
        special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        spell = _spell_byte_level if self._is_byte_level else _spell_byte_fallback
        self.all = TokenBytes(tokenizer, spell)
        """Exact bytes of every token id, including special tokens."""
        self.special = special
        self._tokenizer = tokenizer
        self._spell = spell
        self._shown: dict[frozenset[str], TokenBytes] = {}
        """Bytes of token ids, by the set of special tokens that are shown."""
        self._byte_tokens: dict[int, int] = {}
        if not self._is_byte_level:
            ids = ((tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
            self._byte_tokens = {token: byte for token, byte in ids if token is not None}

    def detokenizer(self, shown: frozenset[str] | None = frozenset()) -> Detokenizer:
        """Returns a new detokenizer that shows the special tokens `shown`. If `shown` is None, it
        shows all special tokens."""
        spelled = self.all if shown is None else self._showing(shown & self.special)
        if self._is_byte_level:
            return ByteLevelDetokenizer(spelled)
        return ByteFallbackDetokenizer(spelled, self._byte_tokens)

    def _showing(self, shown: frozenset[str]) -> TokenBytes:
        """Returns the table of bytes in which special tokens other than `shown` have empty
        bytes."""
        if shown not in self._shown:
            hidden, spell = self.special - shown, self._spell
            self._shown[shown] = TokenBytes(
                self._tokenizer, lambda text: b"" if text in hidden else spell(text)
            )
        return self._shown[shown]


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    steps = [decoder] if decoder else []
    while len(steps) == 1 and steps[0]["type"] == "Sequence":
        steps = steps[0]["decoders"]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True
    # Some decoders end with a step that strips the space before the first word. That space must be
    # kept here, because an answer continues a prompt.
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replace = steps[0]
        if replace["pattern"] == {"String": "▁"} and replace["content"] == " ":
            return False
    raise UnsupportedDecoder(f"decoder {' + '.join(kinds) or 'none'} is not supported")


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte for which each character of GPT-2's byte alphabet stands."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = [*printable, *(256 + i for i in range(len(others)))]
    return {
        chr(stand_in): byte for stand_in, byte in zip(stand_ins, printable + others, strict=True)
    }


BYTE_OF = _byte_alphabet()


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _spell_byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
