"""Embeddings through the official client."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from gateway.dispatch.generation import MAX_AT_ONCE
from gateway.metering.usage_loader import Status, UsageRecord
from gateway.metering.wal_files import read_frames
from tests.gateway.scripts import embed, ids, vector_of
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker
from workers.wire.client import WorkerFailed
from workers.wire.protocol import (
    ErrorCode,
    Generate,
    OutputKind,
    Pooling,
    SamplingParams,
    SequenceOutput,
)


def vector(tokens: list[int]) -> NDArray[np.float32]:
    return vector_of(Generate(0, "", "", tokens, SamplingParams(0, 0), ""))


def unit(given: NDArray[np.float32]) -> NDArray[np.float32]:
    return given / np.linalg.norm(given)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("Once", [ids("Once")]),
        (["one", "two"], [ids("one"), ids("two")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
    ids=["text", "texts", "ids", "lists"],
)
@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_every_form_of_input(
    client: openai.OpenAI,
    worker: ScriptedWorker,
    given: Any,
    prompts: list[list[int]],
    encoding: Any,
) -> None:
    """The client asks for base64 by itself where no format is given, and decodes it."""
    worker.script = embed
    options = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="tiny", input=given, user="u", **options)
    assert answer.object == "list" and answer.model == "tiny"
    assert [entry.index for entry in answer.data] == list(range(len(prompts)))
    for entry, tokens in zip(answer.data, prompts, strict=True):
        assert entry.object == "embedding"
        shown: Any = entry.embedding
        if encoding == "base64":
            shown = np.frombuffer(base64.b64decode(shown), "<f4")
        assert np.allclose(shown, unit(vector(tokens)), atol=1e-6)
    total = sum(map(len, prompts))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (total, total)
    request = worker.requests[-1]
    assert request.kind is OutputKind.EMBED and request.pooling is Pooling.LAST
    assert request.params.max_tokens == 0 and request.params.prompt_logprobs is None


def test_dimensions_are_cut_before_the_length_is_made_1(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = embed
    answer = client.embeddings.create(model="support-bot", input="x", dimensions=5)
    assert np.allclose(answer.data[0].embedding, unit(vector(ids("x"))[:5]), atol=1e-6)
    assert worker.requests[-1].adapter is not None


def test_as_many_inputs_as_are_taken_come_back_in_order(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    """A worker has some of them at a time."""
    held: Counter[str] = Counter()
    most = 0

    async def counted(request: Generate) -> AsyncIterator[SequenceOutput]:
        nonlocal most
        held[request.request_id] += 1
        most = max(most, held[request.request_id])
        await asyncio.sleep(0)
        held[request.request_id] -= 1
        async for output in embed(request):
            yield output

    worker.script = counted
    inputs = [[number % 250, number // 250 + 1] for number in range(2048)]
    answer = client.embeddings.create(model="tiny", input=inputs)
    assert most <= MAX_AT_ONCE
    assert len(answer.data) == 2048
    for number in (0, 1, 127, 128, 129, 2047):
        expected = unit(vector(inputs[number]))
        assert np.allclose(answer.data[number].embedding, expected, atol=1e-6)


def test_a_failure_of_one_input_fails_the_request(
    client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        if request.tokens == [2]:
            raise WorkerFailed(ErrorCode.LOGITS_NAN, "not numbers")
        async for output in embed(request):
            yield output

    worker.script = script
    with pytest.raises(openai.InternalServerError):
        client.embeddings.create(model="tiny", input=[[1], [2], [3]])


def test_usage_is_recorded_as_of_a_prompt(
    service: Service, client: openai.OpenAI, worker: ScriptedWorker
) -> None:
    worker.script = embed
    answer = client.embeddings.with_raw_response.create(model="support-bot", input=["four", "more"])
    assert answer.headers["loraplex-adapter-version"] == "7"
    decoder = msgspec.msgpack.Decoder(UsageRecord)
    (record,) = [
        record
        for path in service.config.wal.rglob("0*")
        for record in map(decoder.decode, read_frames(path.read_bytes())[0])
        if record.request_id == answer.headers["x-request-id"]
    ]
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (8, 4, 0)
    assert (record.adapter, record.adapter_version) == ("support-bot", 7)
    assert record.finish_reasons == [] and record.status is Status.COMPLETED
