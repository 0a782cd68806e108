"""Tools and thoughts through the official client, on a model with the template of Qwen 3."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from examples import agent
from tests.gateway.dialects.test_tool_prompts import WEATHER
from tests.gateway.scripts import say, spelled
from tests.gateway.service import Service
from tests.scripted_worker import ScriptedWorker
from workers.wire.protocol import Generate, SequenceOutput

TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
ASK: list[Any] = [{"role": "user", "content": "Weather in Bern?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def service(qwen3: Service) -> Service:
    return qwen3


def test_one_call_where_no_more_are_wanted(client: openai.OpenAI, worker: ScriptedWorker) -> None:
    """What follows it is not waited for."""
    worker.script = say(f"{CALL}\n{OTHER_CALL}" + "x" * 1000, pause_s=0.001)
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, parallel_tool_calls=False
    )
    choice = answer.choices[0]
    assert choice.message.tool_calls and len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    Service.wait_for(lambda: worker.requests[-1] in worker.aborted)


def test_the_example_of_an_agent(
    client: openai.OpenAI, worker: ScriptedWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """It calls two functions, is told of a wrong call, and answers."""
    calls = [("find_parcel", {"number": "7"}), ("add", {"a": 1, "b": 2.5}), ("add", {})]
    written = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    answers = iter([*(f"<tool_call>\n{call}\n</tool_call>" for call in written), "In Bern."])

    def script(request: Generate) -> AsyncIterator[SequenceOutput]:
        return say(next(answers))(request)

    worker.script = script
    assert agent.answer(client, "tiny", "Where is parcel 7?") == "In Bern."
    told = capsys.readouterr().out
    assert "found in Bern" in told and "-> 3.5" in told and "error: " in told
    assert "found in Bern" in spelled(worker.requests[-1].tokens)
