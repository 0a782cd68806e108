"""What agents send: those of a library of agents as they run, and recorded requests of Claude Code
2.1.197, Codex 0.169.0, OpenCode 1.18.33 and pi 0.74.2, the texts cut short and ids replaced."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import msgspec
import openai
import pytest

from tests.gateway.scripts import Script, say, spelled
from tests.gateway.service import Service, snapshot
from tests.gateway.templated import templated_service
from workers.wire.protocol import Generate, SequenceOutput

COMMAND = "echo 42 > answer.txt"
TASK = "Write 42 into answer.txt"
EPHEMERAL = {"type": "ephemeral"}
RECORDINGS = Path(__file__).parent / "recordings"
TEMPLATES = Path(__file__).parents[1] / "text/templates"
FAMILIES = ("gemma2", "gemma3", "hermes3", "llama3.1", "mistral-nemo", "phi3.5", "qwen3.5")
CONTEXT = 1 << 15


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The template of Qwen 3, and a version of the adapter with that of each other family."""
    with templated_service(tmp_path_factory.mktemp("agents"), length=CONTEXT) as service:
        plain = snapshot(service.keys.records, generation=3, max_model_len=CONTEXT)
        first = plain.versions[0]
        versions = [
            msgspec.structs.replace(
                first,
                version=FIRST_VERSION + number,
                digest=f"{first.digest}-{name}",
                serving=msgspec.structs.replace(
                    first.serving, chat_template=(TEMPLATES / f"{name}.jinja").read_text()
                ),
            )
            for number, name in enumerate(FAMILIES)
        ]
        fed = msgspec.structs.replace(
            plain,
            versions=(*plain.versions, *versions),
            approved_templates=frozenset(
                version.serving.template_digest or "" for version in versions
            ),
        )
        service.feed(fed)
        yield service


FIRST_VERSION = 101


class Agent(NamedTuple):
    """A coding agent, and what it sent."""

    path: str
    first: dict[str, Any]
    """Its first request."""
    later: dict[str, Any]
    """A request after some calls; of the first two with pictures, a call that failed and more."""
    tool: str
    arguments: dict[str, Any]
    dropped: set[str]
    dropped_later: set[str]

    @property
    def turns(self) -> str:
        """The field with the conversation."""
        return "input" if "input" in self.first else "messages"

    def post(self, service: Service, body: dict[str, Any]) -> httpx.Response:
        return service.post(self.path, body)

    def ask(self, service: Service, script: Script, *more: Any) -> list[Any]:
        """The events of the first request, with further turns."""
        service.worker.script = script
        body = self.first | {self.turns: [*self.first[self.turns], *more], "max_tokens": 400}
        if self.turns == "input":
            del body["max_tokens"]
        body.pop("max_completion_tokens", None)
        answer = self.post(service, body)
        assert answer.status_code == 200, answer.text
        assert names_of(answer) >= self.dropped
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]


def names_of(answer: httpx.Response) -> set[str]:
    """What an answer says was dropped."""
    return set(answer.headers.get("loraplex-dropped", "").split(", ")) - {""}


def recorded(name: str, tool: str, arguments: Any, dropped: set[str], later: set[str]) -> Agent:
    recording = json.loads((RECORDINGS / f"{name}.json").read_text())
    return Agent(recording["path"], *recording["requests"], tool, arguments, dropped, later)


OF_CLAUDE_CODE = {"billing_header", "cache_control", "context_management"}
OF_CODEX = {
    *("client_metadata", "prompt_cache_key", "tools.options", "tools.web_search"),
}
AGENTS = {
    "claude_code": recorded(
        "claude_code",
        "Bash",
        {"command": COMMAND, "description": "Writes"},
        OF_CLAUDE_CODE,
        OF_CLAUDE_CODE | {"content.document", "content.image", "is_error", "tools.options"},
    ),
    "codex": recorded(
        "codex", "exec_command", {"cmd": COMMAND}, OF_CODEX, OF_CODEX | {"content.image"}
    ),
    "opencode": recorded("opencode", "bash", {"command": COMMAND}, set(), set()),
    "pi": recorded("pi", "bash", {"command": COMMAND}, set(), set()),
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


def turns_of_chat(events: list[Any]) -> list[Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                (known,) = message.setdefault("tool_calls", [{**call, "function": {}}])
                for name, text in call["function"].items():
                    known["function"][name] = known["function"].get(name, "") + text
    id = message["tool_calls"][0]["id"]
    return [message, {"role": "tool", "tool_call_id": id, "content": "(no output)"}]


TURNS_OF = {
    "/v1/messages?beta=true": turns_of_messages,
    "/v1/responses": turns_of_responses,
    "/v1/chat/completions": turns_of_chat,
}


@pytest.mark.parametrize("name", AGENTS)
def test_a_session_with_a_tool(service: Service, name: str) -> None:
    agent = AGENTS[name]
    call = json.dumps({"name": agent.tool, "arguments": agent.arguments})
    script = say(f"<think>\nA tool.\n</think>\n\n<tool_call>\n{call}\n</tool_call>", per_step=4)
    events = agent.ask(service, script)
    first = spelled(service.worker.requests[-1].tokens)
    assert "billing" not in first and TASK in first and '"web_search"' not in first
    turns = TURNS_OF[agent.path](events)
    last = agent.ask(service, say("The answer is written."), *turns)[-1]
    assert last.get("type", "chunk") in ("message_stop", "response.completed", "chunk")
    second = spelled(service.worker.requests[-1].tokens)
    begun = first.removesuffix("<|im_start|>assistant\n")
    assert second.startswith(begun) and call in second and "(no output)" in second
    assert "<think>\nA tool.\n</think>" in second


def test_a_call_of_a_function_in_a_namespace(service: Service) -> None:
    """The model calls it by one name, the client is answered the two that it gave."""
    agent = AGENTS["codex"]
    called = '{"name": "mcp__parcels__find_parcel", "arguments": {"q": "7"}}'
    script = say(f"<think>\nA tool.\n</think>\n\n<tool_call>\n{called}\n</tool_call>")
    events = agent.ask(service, script)
    turns = turns_of_responses(events)
    assert (turns[1]["namespace"], turns[1]["name"]) == ("mcp__parcels", "find_parcel")
    (done,) = [event for event in events if event["type"].endswith("arguments.done")]
    assert done["name"] == "find_parcel"
    agent.ask(service, say("ok"), *turns)
    prompt = spelled(service.worker.requests[-1].tokens)
    assert called in prompt and '{"name": "mcp__parcels__add_note", "description"' in prompt


@pytest.mark.parametrize("family", ["qwen3", *FAMILIES])
@pytest.mark.parametrize("name", AGENTS)
def test_recorded_requests_over_families_of_templates(
    service: Service, name: str, family: str
) -> None:
    agent = AGENTS[name]
    service.worker.script = say("ok")
    model = "tiny"
    if family != "qwen3":
        model = f"support-bot@{FIRST_VERSION + FAMILIES.index(family)}"
    for body, dropped in ((agent.first, agent.dropped), (agent.later, agent.dropped_later)):
        for field in ("max_tokens", "max_completion_tokens"):
            if field in body:
                body[field] = 8
        answer = agent.post(service, body | {"model": model})
        assert answer.status_code == 200, answer.text
        assert names_of(answer) - {"folded_turns"} == dropped
        prompt = spelled(service.worker.requests[-1].tokens)
        assert TASK in prompt and ("folded_turns" in names_of(answer) or family != "gemma2")
        assert body is agent.first or "answer.txt; cat answer.txt" in prompt


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
    from pydantic_ai import Agent as LibraryAgent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

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
