"""What agents send: those of a library of agents as they run, and the bodies of a session of
Claude Code (2.1) and of Codex (0.169), the texts cut short. An unknown field would end it at its
first request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest
from pydantic_ai import Agent as LibraryAgent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.gateway.scripts import Script, say, spelled
from tests.gateway.service import Service
from tests.gateway.templated import templated_service
from workers.wire.protocol import Generate, SequenceOutput

COMMAND = "echo 42 > answer.txt"
TASK = "Write 42 into answer.txt"
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}, "cmd": {"type": "string"}},
    "additionalProperties": False,
}
EPHEMERAL = {"type": "ephemeral"}
CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nA date.\n</system-reminder>"},
                {"type": "text", "text": TASK, "cache_control": EPHEMERAL},
            ],
        },
        {"role": "system", "content": "Available agent types: none"},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "\nBe careful.", "cache_control": EPHEMERAL},
    ],
    "tools": [{"name": "Bash", "description": "Runs a command", "input_schema": SCHEMA}],
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    "max_tokens": 400,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CODEX: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": f"msg_{number}",
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }
        for number, (role, text) in enumerate(
            [("developer", "You are an agent."), ("developer", "Skills."), ("user", TASK)]
        )
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command",
            "strict": False,
            "parameters": SCHEMA,
        },
        {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": []},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "session",
    "client_metadata": {"session_id": "session", "turn_id": "turn"},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with templated_service(tmp_path_factory.mktemp("agents")) as service:
        yield service


class Agent(NamedTuple):
    path: str
    body: dict[str, Any]
    conversation: str
    """Field with the turns."""
    tool: str
    arguments: dict[str, Any]
    dropped: set[str]

    def ask(self, service: Service, script: Script, *more: Any) -> list[Any]:
        """The events of a request; more: further turns."""
        service.worker.script = script
        body = self.body | {self.conversation: [*self.body[self.conversation], *more]}
        headers = {"authorization": f"Bearer {service.keys.acme}"}
        answer = httpx.post(f"{service.url}{self.path}", json=body, headers=headers, timeout=20)
        assert answer.status_code == 200, answer.text
        assert set(answer.headers["loraplex-dropped"].split(", ")) >= self.dropped
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]


AGENTS = {
    "claude_code": Agent(
        "/v1/messages?beta=true",
        CLAUDE_CODE,
        "messages",
        "Bash",
        {"command": COMMAND, "description": "Writes"},
        {"billing_header", "cache_control", "context_management"},
    ),
    "codex": Agent(
        "/v1/responses",
        CODEX,
        "input",
        "exec_command",
        {"cmd": COMMAND},
        {
            *("client_metadata", "prompt_cache_key", "reasoning.options"),
            *("tools.namespace", "tools.web_search"),
        },
    ),
}


def turns_of_messages(events: list[Any]) -> list[Any]:
    """The answer and the tool's result, as the agent sends them back."""
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "input_json_delta":
                block["written"] = block.get("written", "") + delta["partial_json"]
            elif delta["type"] == "thinking_delta":
                block["thinking"] += delta["thinking"]
            elif delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
    thought, call = blocks
    call["input"] = json.loads(call.pop("written"))
    result = {
        "tool_use_id": call["id"],
        "type": "tool_result",
        "content": "(no output)",
        "is_error": False,
        "cache_control": EPHEMERAL,
    }
    return [
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [result]},
    ]


def turns_of_responses(events: list[Any]) -> list[Any]:
    items = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    thought, call = items
    del thought["status"], thought["content"]
    output = {"type": "function_call_output", "id": "fco_1", "output": "(no output)"}
    return [thought, call, output | {"call_id": call["call_id"]}]


@pytest.mark.parametrize("name", AGENTS)
def test_a_session_with_a_tool(service: Service, name: str) -> None:
    agent = AGENTS[name]
    call = json.dumps({"name": agent.tool, "arguments": agent.arguments})
    script = say(f"<think>\nA tool.\n</think>\n\n<tool_call>\n{call}\n</tool_call>", per_step=4)
    events = agent.ask(service, script)
    first = spelled(service.worker.requests[-1].tokens)
    assert "billing" not in first and TASK in first and "web_search" not in first
    turns = (turns_of_messages if name == "claude_code" else turns_of_responses)(events)
    last = agent.ask(service, say("The answer is written."), *turns)[-1]
    assert last["type"] in ("message_stop", "response.completed")
    second = spelled(service.worker.requests[-1].tokens)
    begun = first.removesuffix("<|im_start|>assistant\n")
    assert second.startswith(begun) and call in second and "(no output)" in second
    assert "<think>\nA tool.\n</think>" in second


def call_then_say(request: Generate) -> AsyncIterator[SequenceOutput]:
    """Calls the tool, and ends when its result is there."""
    last = spelled(request.tokens).rsplit("<|im_start|>", 2)[-2]
    call = json.dumps({"name": "weather", "arguments": {"city": "Bern"}})
    text = "<think>\nA tool.\n</think>\n\n"
    text += "It rains." if "rain in Bern" in last else f"<tool_call>\n{call}\n</tool_call>"
    return say(text, per_step=3)(request)


@pytest.mark.parametrize("dialect", ["messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_of_a_library(service: Service, dialect: str, stream: bool) -> None:
    service.worker.script = call_then_say
    options: dict[str, Any] = {"api_key": service.keys.acme, "max_retries": 0, "timeout": 20}
    async with (
        anthropic.AsyncAnthropic(base_url=service.url, **options) as messages,
        openai.AsyncOpenAI(base_url=f"{service.url}/v1", **options) as responses,
    ):
        models = {
            "messages": AnthropicModel(
                "tiny", provider=AnthropicProvider(anthropic_client=messages)
            ),
            "responses": OpenAIResponsesModel(
                "tiny", provider=OpenAIProvider(openai_client=responses)
            ),
        }
        agent = LibraryAgent(models[dialect], model_settings={"max_tokens": 400})
        asked: list[str] = []

        @agent.tool_plain
        def weather(city: str) -> str:  # pyright: ignore[reportUnusedFunction]
            asked.append(city)
            return f"rain in {city}"

        if stream:
            async with agent.run_stream("Weather?") as running:
                output = await running.get_output()
        else:
            output = (await agent.run("Weather?")).output
    assert (asked, output) == (["Bern"], "It rains.")
