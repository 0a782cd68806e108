"""Token ids to text, a few at a time: exact, linear, and never half a character.

A tokenizer's decoder is one of two kinds here. Byte-level (GPT-2, Llama 3, Qwen, SmolLM): tokens
spell bytes, the text is their UTF-8. Byte-fallback (Gemma, Mistral, Llama 2): tokens spell text
with U+2581 for a space, and runs of `<0xNN>` tokens spell bytes which are text only if the whole
run is UTF-8. Everything else is refused by name.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class UnsupportedDecoder(ValueError):
    """The tokenizer's decoder is of no known kind."""


class TokenBytes(dict[int, bytes]):
    """The bytes each id spells, looked up at first use; ids outside the vocabulary spell none."""

    def __init__(self, tokenizer: Tokenizer, spell: Callable[[str], bytes]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._spell = spell

    def __missing__(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        value = self[token] = b"" if text is None else self._spell(text)
        return value


class ByteLevelDetokenizer:
    """`spelled` must spell special tokens as nothing if they are to be skipped."""

    def __init__(self, spelled: TokenBytes) -> None:
        self._spelled = spelled
        self._decode = Utf8Decoder("replace").decode

    def push(self, tokens: Iterable[int]) -> str:
        spelled = self._spelled
        return self._decode(b"".join([spelled[token] for token in tokens]))

    def flush(self) -> str:
        return self._decode(b"", True)


class ByteFallbackDetokenizer:
    """Holds a run of byte tokens until it ends: one bad byte makes all of it replacements."""

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
"""`push` gives the text that has become certain with these ids, `flush` at the end what is left of
an unfinished character, as replacement characters."""


class Spelling:
    """How a tokenizer's ids become bytes and text."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        """`decoder` is that of tokenizer.json; UnsupportedDecoder if its kind is unknown."""
        self._is_byte_level = _is_byte_level(decoder)
        special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        spell = _spell_byte_level if self._is_byte_level else _spell_byte_fallback
        self.all = TokenBytes(tokenizer, spell)
        """The exact bytes of every id, special ones included."""
        self.special = special
        self._tokenizer = tokenizer
        self._spell = spell
        self._shown: dict[frozenset[str], TokenBytes] = {}
        """By the special tokens that are shown."""
        self._byte_tokens: dict[int, int] = {}
        if not self._is_byte_level:
            ids = ((tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
            self._byte_tokens = {token: byte for token, byte in ids if token is not None}

    def detokenizer(self, shown: frozenset[str] | None = frozenset()) -> Detokenizer:
        """`shown`: special tokens that are in the text; None: all are."""
        spelled = self.all if shown is None else self._showing(shown & self.special)
        if self._is_byte_level:
            return ByteLevelDetokenizer(spelled)
        return ByteFallbackDetokenizer(spelled, self._byte_tokens)

    def _showing(self, shown: frozenset[str]) -> TokenBytes:
        """The bytes of ids without special tokens other than these: one table for each set."""
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
    # The last step of some strips the space before the first word of a text; an answer goes on
    # after a prompt, so that space belongs to it.
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replace = steps[0]
        if replace["pattern"] == {"String": "▁"} and replace["content"] == " ":
            return False
    raise UnsupportedDecoder(f"decoder {' + '.join(kinds) or 'none'} is not supported")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte, inverted."""
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
