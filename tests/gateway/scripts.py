"""What a scripted worker answers: a function from Generate to outputs, and the usual ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.doubles import SIZES
from workers.wire.client import WorkerFailed
from workers.wire.protocol import (
    ALL_TOKENS,
    ErrorCode,
    FinishReason,
    Generate,
    OutputKind,
    SequenceOutput,
    TokenLogprobs,
)

Script = Callable[[Generate], AsyncIterator[SequenceOutput]]

IM_END = 257
ALPHABET = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in ALPHABET]
ID_OF_BYTE = {byte: i for i, byte in enumerate(ALPHABET + OTHERS)}
"""Ids of the tiny tokenizer: the alphabet's stand-ins in order of their code points."""
BYTE_OF_ID = {token: byte for byte, token in ID_OF_BYTE.items()}
SPECIALS = {256: b"<|bos|>", 257: b"<|im_end|>", 258: b"<|pad|>", 259: b"<|im_start|>"}


def ids(text: str) -> list[int]:
    return [ID_OF_BYTE[byte] for byte in text.encode()]


def spelled(tokens: list[int]) -> str:
    parts = [SPECIALS.get(t) or bytes([BYTE_OF_ID[t]]) for t in tokens]
    return b"".join(parts).decode()


def scored(token: int, num_top: int | None, named: Sequence[int] = ()) -> TokenLogprobs:
    """Ever the same numbers: the token itself, then its neighbours, each less likely. Those that
    are `named` are told in place of them."""
    if named:
        return TokenLogprobs(token, -0.5, [(other, -0.25 * other) for other in named])
    num_others = SIZES["vocab_size"] if num_top == ALL_TOKENS else num_top or 0
    top = [((token + i) % SIZES["vocab_size"], -0.5 - i) for i in range(num_others)]
    return TokenLogprobs(token, -0.5, top)


def vector_of(request: Generate) -> NDArray[np.float32]:
    """Another for each prompt, and not of length 1."""
    size = len(request.labels) or SIZES["hidden_size"]
    return np.random.default_rng(request.tokens).normal(size=size).astype("<f4") * 3


async def embed(request: Generate) -> AsyncIterator[SequenceOutput]:
    """Half of the prompt was in the prefix cache."""
    yield SequenceOutput(
        id=request.id,
        tokens=[],
        finish_reason=FinishReason.STOP,
        num_cached_tokens=len(request.tokens) // 2,
        vector=vector_of(request).tobytes(),
    )


def say(text: str, *, per_step: int = 1, pause_s: float = 0.0, cached: int = 0) -> Script:
    """The text, byte by byte, then the end of turn; as much of it as max_tokens allows."""

    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        if request.kind is OutputKind.EMBED:
            async for output in embed(request):
                yield output
            return
        params = request.params
        wanted = [*ids(text), IM_END]
        tokens = wanted[: params.max_tokens]
        scores = params.logprobs is not None
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [scored(t, params.prompt_logprobs) for t in request.tokens[1:]]
        steps = [tokens[i : i + per_step] for i in range(0, len(tokens), per_step)] or [[]]
        for i, step in enumerate(steps):
            is_last = i == len(steps) - 1
            ends = is_last and len(tokens) == len(wanted)
            await asyncio.sleep(pause_s)
            yield SequenceOutput(
                id=request.id,
                tokens=step,
                logprobs=(
                    [scored(t, params.logprobs, params.logprob_token_ids) for t in step]
                    if scores
                    else None
                ),
                prompt_logprobs=prompt_logprobs if i == 0 else None,
                finish_reason=(
                    (FinishReason.STOP if ends else FinishReason.LENGTH) if is_last else None
                ),
                stop_token=IM_END if ends else None,
                num_cached_tokens=cached if i == 0 or is_last else 0,
            )

    return script


def repeat_prompt(request: Generate) -> AsyncIterator[SequenceOutput]:
    """Says the prompt and the number of the choice, so that each answer shows its request."""
    return say(f"{spelled(request.tokens)}#{request.params.choice}")(request)


def endless(pause_s: float = 0.01) -> Script:
    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        while True:
            await asyncio.sleep(pause_s)
            yield SequenceOutput(id=request.id, tokens=ids("a"))

    return script


async def broken(request: Generate) -> AsyncIterator[SequenceOutput]:
    """Fails in the middle of the answer."""
    yield SequenceOutput(id=request.id, tokens=ids("abc"))
    raise WorkerFailed(ErrorCode.LOGITS_NAN, "no numbers")


async def silence(request: Generate) -> AsyncIterator[SequenceOutput]:
    await asyncio.sleep(3600)
    yield SequenceOutput(id=request.id, tokens=[])
