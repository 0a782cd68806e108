"""Chat completions through the official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from tests.gateway.scripts import endless, ids, say
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker
from workers.wire.protocol import Generate, SequenceOutput

HELLO = [{"role": "user", "content": "Hi"}]


def test_a_sharing_group_is_the_cache_domain(service: Service, worker: ScriptedWorker) -> None:
    worker.script = say("ok")
    with service.client(service.keys.globex) as client:
        client.chat.completions.create(model="support-bot", messages=HELLO)
    asked = worker.requests[-1]
    assert (asked.tenant, asked.cache_domain) == ("ten_globex", "group:family")
    assert asked.adapter and asked.adapter.digest == "ten_globex-support-bot-1"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_own_sequence_while_others_go_on(
    client: openai.OpenAI, worker: ScriptedWorker, stream: bool
) -> None:
    """The second choice begins when the first is aborted, or never."""

    async def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        if request.params.choice == 0:
            source = endless()
            yield SequenceOutput(id=request.id, tokens=ids("oneSTOP"))
        else:
            async with asyncio.timeout(10):
                while not any(r.params.choice == 0 for r in worker.aborted[before:]):
                    await asyncio.sleep(0.01)
            source = say("two")
        async for output in source(request):
            yield output

    worker.script = script
    before = len(worker.aborted)
    texts = ["", ""]
    if stream:
        for chunk in client.chat.completions.create(
            model="tiny", messages=HELLO, n=2, stop="STOP", stream=True
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        answer = client.chat.completions.create(model="tiny", messages=HELLO, n=2, stop="STOP")
        texts = [choice.message.content or "" for choice in answer.choices]
    assert texts == ["one", "two"]
    assert [r.params.choice for r in worker.aborted[before:]] == [0]
