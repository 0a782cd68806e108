"""Each cell of the matrix of features and dialects in docs/use/api-dialects.md holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from gateway.dialects.chat_completions import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.messages_fields import MessagesRequest
from gateway.dialects.responses_fields import ResponsesRequest
from store.records import Alias
from tests.gateway.dialects import test_usage_and_limits
from tests.gateway.scripts import say, spelled
from tests.gateway.service import Service, snapshot
from tests.gateway.templated import LENGTH, templated_service
from tools.source_tree import ROOT
from workers.wire.protocol import Generate

PAGE = (ROOT / "docs/use/api-dialects.md").read_text()
PARAMETERS = (ROOT / "docs/use/api-parameters.md").read_text()
WORD = "zebra"
SAID: list[Any] = [{"role": "user", "content": WORD}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
}
NAMED = {"name": "s", "schema": SCHEMA}
LIVE = {"chat", "completions", "Messages", "Responses"}
"""Those that generate."""
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAID, "max_tokens": 90}),
    "completions": ("/v1/completions", {"prompt": WORD, "max_tokens": 90}),
    "Messages": ("/v1/messages", {"messages": SAID, "max_tokens": 90}),
    "Responses": ("/v1/responses", {"input": WORD, "max_output_tokens": 90}),
    "embeddings": ("/v1/embeddings", {"input": WORD}),
    "embed": ("/v2/embed", {"texts": [WORD]}),
    "score": ("/v1/score", {"queries": "q", "documents": WORD}),
    "rerank": ("/v1/rerank", {"query": "q", "documents": [WORD]}),
}
SCHEMAS = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "Messages": MessagesRequest,
    "Responses": ResponsesRequest,
}


def matrix() -> dict[str, dict[str, str]]:
    """The cells by feature and dialect, as the page has them."""
    section = PAGE.split("\n## Dialects\n")[1].split("\n## ")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


MATRIX = matrix()


class Probe(NamedTuple):
    """Requests in one dialect."""

    service: Service
    dialect: str
    cell: str

    @property
    def names(self) -> list[str]:
        """What the cell names as code."""
        return re.findall(r"`([^`]+)`", self.cell)

    @property
    def is_no(self) -> bool:
        return self.cell in ("no", "-")

    def post(self, said: str = "ok", *, cached: int = 0, **fields: Any) -> httpx.Response:
        """The worker answers `said`."""
        self.service.worker.script = say(said, cached=cached)
        path, body = BODIES[self.dialect]
        return httpx.post(
            self.service.url + path,
            json={"model": "tiny", **body, **fields},
            headers={"authorization": f"Bearer {self.service.keys.acme}"},
            timeout=20,
        )

    def answered(self, said: str = "ok", **fields: Any) -> dict[str, Any]:
        answer = self.post(said, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def sent(self, **fields: Any) -> Generate:
        """What the worker is asked at last."""
        self.answered(**fields)
        return self.service.worker.requests[-1]

    def conversation(self, messages: list[Any]) -> dict[str, Any]:
        """The fields of a conversation, which embeddings take in place of their input."""
        return {"messages": messages} | ({"input": None} if self.dialect == "embeddings" else {})

    def refuses(self, name: str, value: Any) -> None:
        """By the field's name, before a worker is asked."""
        before = len(self.service.worker.requests)
        answer = self.post(**{name: value})
        assert answer.status_code == 400 and name in answer.json()["error"]["message"]
        assert len(self.service.worker.requests) == before

    def text_of(self, answer: dict[str, Any]) -> str:
        match self.dialect:
            case "chat":
                return answer["choices"][0]["message"]["content"]
            case "completions":
                return answer["choices"][0]["text"]
            case "Messages":
                return "".join([b["text"] for b in answer["content"] if b["type"] == "text"])
            case _:
                items = [item for item in answer["output"] if item["type"] == "message"]
                return "".join([part["text"] for item in items for part in item["content"]])


def streamed(probe: Probe) -> None:
    if probe.cell == "whole":
        probe.refuses("stream", True)
        return
    kinds = [probe.post(stream=stream).headers["content-type"] for stream in (False, True)]
    assert kinds == ["application/json", "text/event-stream; charset=utf-8"]


def asks_with(probe: Probe) -> None:
    """Each field that the cell names is in the prompt."""
    for name in probe.names:
        value: Any = [WORD] * 2 if name in ("documents", "texts") else WORD
        fields = {name: value} if name != "messages" else probe.conversation(SAID)
        if name == "inputs":
            part = {"type": "text", "text": WORD}
            fields = {"texts": None, "inputs": [{"content": [part]}]}
        assert WORD in spelled(probe.sent(**fields).tokens)


def answers_per_request(probe: Probe) -> None:
    match probe.dialect:
        case "chat" | "completions":
            assert len(probe.answered(n=3)["choices"]) == 3
            if probe.dialect == "completions":
                assert len(probe.answered(prompt=["a", "b"], n=3)["choices"]) == 6
        case "Messages" | "Responses":
            probe.refuses("n", 2)
        case "embeddings":
            assert len(probe.answered(input=["a", "b", "c"])["data"]) == 3
        case "embed":
            answer = probe.answered(texts=["a", "b", "c"])
            assert len(answer["embeddings"]["float"]) == 3
        case "score":
            assert len(probe.answered(documents=["a", "b", "c"])["data"]) == 3
        case _:
            answer = probe.answered(documents=["a", "b", "c"], top_n=2)
            assert len(answer["results"]) == 2


def adapters(probe: Probe) -> None:
    for model, digest in (("support-bot", 7), ("support-bot@staging", 3), ("support-bot@7", 7)):
        adapter = probe.sent(model=model).adapter
        assert adapter and adapter.digest == f"ten_acme-support-bot-{digest}"


def canaries(probe: Probe) -> None:
    """Half of all go to another version, a caller always to the same."""
    (name,) = probe.names
    found: set[str] = set()
    for number in range(12):
        field = {"metadata": {"user_id": f"u{number}"}} if "." in name else {name: f"u{number}"}
        digests = {str(probe.sent(model="support-bot@half", **field).adapter) for _ in range(2)}
        assert len(digests) == 1
        found |= digests
    assert len(found) == 2


def stops(probe: Probe) -> None:
    if probe.is_no:
        probe.refuses("stop", ["STOP"])
        return
    answer = probe.answered("one STOP two", **{probe.names[0]: ["STOP"]})
    assert probe.text_of(answer) == "one "
    assert ("reported" in probe.cell) is (answer.get("stop_sequence") == "STOP")


def sampling(probe: Probe) -> None:
    """The cell names what is taken, or what of the table is not; each is in the schema, or is
    not."""
    if probe.is_no:
        probe.refuses("temperature", 0.5)
        return
    section = PARAMETERS.split("\n## Sampling parameters\n")[1].split("\n## ")[0]
    table = {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([a-z_]+)`", line.split("|")[1])
    } - {"logprobs", "top_logprobs"}
    taken = table - set(probe.names) if probe.cell.startswith("all") else set(probe.names)
    written = {"stop": "stop_sequences"} if probe.dialect == "Messages" else {}
    fields = set(SCHEMAS[probe.dialect].__struct_fields__) - set(written.values())
    assert fields & table == taken
    params = probe.sent(temperature=0.5, top_p=0.9, top_k=3).params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 3)


def log_probabilities(probe: Probe) -> None:
    match probe.dialect:
        case "chat":
            told = probe.answered(logprobs=True)["choices"][0]["logprobs"]["content"]
        case "completions":
            told = probe.answered(logprobs=1)["choices"][0]["logprobs"]["tokens"]
            echoed = probe.answered(logprobs=1, echo=True)["choices"][0]["logprobs"]["tokens"]
            assert "".join(echoed) == WORD + "ok<|im_end|>"
        case "Responses":
            fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
            told = probe.answered(**fields)["output"][0]["content"][0]["logprobs"]
            assert [entry["token"] for entry in told] == ["o", "k"]
            assert [len(entry["top_logprobs"]) for entry in told] == [2, 2]
            return
        case _:
            probe.refuses("logprobs", True)
            return
    assert len(told) == 3, "the end token too"


def tools(probe: Probe) -> None:
    tool: dict[str, Any] = {"name": "f", "description": "", "parameters": SCHEMA}
    match probe.dialect:
        case "chat":
            tool = {"type": "function", "function": tool}
        case "Messages":
            tool = {"name": "f", "input_schema": SCHEMA}
        case "Responses":
            tool = {"type": "function", **tool}
        case _:
            probe.refuses("tools", [tool])
            return
    call = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    answer = str(probe.answered(call, tools=[tool]))
    assert any(name in answer for name in ("tool_calls", "tool_use", "function_call"))
    forced: Any = {"type": "any"} if probe.dialect == "Messages" else "required"
    assert '"n"' in probe.sent(said=call, tools=[tool], tool_choice=forced).grammar


def reasoning(probe: Probe) -> None:
    answer = probe.answered("<think>\nHm.\n</think>\n\nok")
    shown = probe.text_of(answer)
    assert ("Hm." in shown) is probe.is_no and shown.endswith("ok") and "Hm." in str(answer)
    mark = {"chat": "reasoning_content", "Messages": "'thinking'", "Responses": "'reasoning'"}
    assert probe.is_no or mark[probe.dialect] in str(answer)


def schemas(probe: Probe) -> None:
    given: dict[str, Any] = {"type": "json_schema", "json_schema": NAMED}
    match probe.dialect:
        case "chat" | "completions":
            fields = {"response_format": given}
        case "Messages":
            fields = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        case "Responses":
            fields = {"text": {"format": {"type": "json_schema", **NAMED}}}
        case _:
            probe.refuses("response_format", given)
            return
    assert '"n"' in probe.sent(**fields).grammar


def begun(probe: Probe) -> None:
    turns = [*SAID, {"role": "assistant", "content": "The best is"}]
    match probe.dialect:
        case "chat" | "embeddings":
            fields = probe.conversation(turns) | {"continue_final_message": True}
        case "completions":
            fields = {"prompt": "The best is"}
        case "Messages":
            fields = {"messages": turns}
        case "Responses":
            fields = {"input": turns}
        case _:
            probe.refuses("continue_final_message", True)
            return
    goes_on = spelled(probe.sent(**fields).tokens).endswith("The best is")
    assert goes_on is not probe.is_no


def templates(probe: Probe) -> None:
    """Version 3 has its own."""
    fields = probe.conversation(SAID) if probe.dialect == "embeddings" else {}
    shown = spelled(probe.sent(model="support-bot@3", **fields).tokens)
    assert shown == WORD if probe.is_no else shown.startswith("OWN ")


def cached(probe: Probe) -> None:
    if probe.dialect == "embed":
        assert probe.answered()["meta"]["billed_units"].keys() == {"input_tokens", "image_tokens"}
        return
    usage = (
        probe.answered(cached=4)["usage"] if probe.dialect in LIVE else probe.answered()["usage"]
    )
    (name,) = probe.names or ("no",)
    if probe.is_no:
        assert usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}
    else:
        told = usage[name]
        assert (told["cached_tokens"] if isinstance(told, dict) else told) == 4


def counting(probe: Probe) -> None:
    _, body = BODIES[probe.dialect]
    asked = {name: body[name] for name in ("messages", "prompt") if name in body}
    answer = httpx.post(
        probe.service.url + probe.names[0],
        json={"model": "tiny", **(asked or {"prompt": WORD})},
        headers={"authorization": f"Bearer {probe.service.keys.acme}"},
        timeout=20,
    ).json()
    counted = answer.get("count", answer.get("input_tokens"))
    assert counted == len(probe.sent().tokens)


def limits(probe: Probe) -> None:
    """Held by the suite that goes through all routes."""
    path, _ = BODIES[probe.dialect]
    (route,) = [each for each in test_usage_and_limits.METERED.values() if each.path == path]
    assert (route.num_generated > 0) is (probe.cell == "yes")


def errors(probe: Probe) -> None:
    wrong, away = probe.post(frobnicate=1), probe.post(model="elsewhere")
    is_anthropic = probe.cell.startswith("Anthropic's")
    assert ("request_id" in wrong.json()) is is_anthropic
    assert (wrong.status_code, away.status_code) == (400, 529 if is_anthropic else 503)


def images(probe: Probe) -> None:
    parts: dict[str, Any] = {
        "chat": {"type": "image_url", "image_url": {"url": "data:,"}},
        "Messages": {"type": "image", "source": {"type": "url", "url": "data:,"}},
        "Responses": {"type": "input_image", "image_url": "data:,"},
    }
    turns = [{"role": "user", "content": [parts.get(probe.dialect)]}]
    fields: dict[str, Any] = {
        "chat": {"messages": turns},
        "Messages": {"messages": turns},
        "Responses": {"input": turns},
        "completions": {"prompt": [{"image": "data:,"}]},
        "embeddings": {"input": [{"image": "data:,"}]},
        "embed": {"images": ["data:,"]},
        "score": {"text_2": [{"image": "data:,"}]},
        "rerank": {"documents": [{"image": "data:,"}]},
    }
    ((name, value),) = fields[probe.dialect].items()
    answer = probe.post(**{name: value})
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


CHECKS: dict[str, Callable[[Probe], None]] = {
    "streamed or whole": streamed,
    "input": asks_with,
    "answers per request": answers_per_request,
    "adapters, aliases, canaries": adapters,
    "canaries are assigned by": canaries,
    "stop strings": stops,
    "sampling": sampling,
    "log-probabilities": log_probabilities,
    "tools": tools,
    "reasoning": reasoning,
    "JSON Schema": schemas,
    "continuing a begun answer": begun,
    "chat template of an adapter": templates,
    "cached prompt tokens": cached,
    "counting tokens": counting,
    "limits, usage, prices": limits,
    "errors": errors,
    "images, audio, files": images,
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The template of Qwen 3; version 3 of the adapter brings its own, and `half` splits."""
    with templated_service(tmp_path_factory.mktemp("matrix")) as service:
        plain = snapshot(service.keys.records, generation=3, max_model_len=LENGTH)
        own = "OWN {{ messages[-1].content }}"
        first, *others = plain.versions
        serving = msgspec.structs.replace(first.serving, chat_template=own)
        first = msgspec.structs.replace(first, serving=serving)
        half = Alias("ten_acme", "support-bot", "half", 7, {7: 50, 3: 50})
        fed = msgspec.structs.replace(
            plain,
            versions=(first, *others),
            aliases=(*plain.aliases, half),
            approved_templates=frozenset({serving.template_digest or ""}),
        )
        service.call(lambda: service.source.feed(fed))
        service.wait_for(lambda: service.gateway.catalog.current.generation == 3)
        yield service


def test_a_safety_identifier_splits_canaries_as_a_user_does(service: Service) -> None:
    """It keeps a caller on one version, and `user` comes before it."""

    def version(**fields: str) -> str:
        return str(Probe(service, "chat", "").sent(model="support-bot@half", **fields).adapter)

    callers = [f"u{number}" for number in range(12)]
    by_user = [version(user=caller) for caller in callers]
    assert len(set(by_user)) == 2
    assert [version(safety_identifier=caller) for caller in callers] == by_user
    assert [version(safety_identifier="other", user=caller) for caller in callers] == by_user


CELLS = [
    (feature, dialect)
    for feature in CHECKS
    for dialect in BODIES
    # No route counts tokens of these, and these generate no thoughts.
    if (feature, MATRIX[feature][dialect]) not in (("reasoning", "-"), ("counting tokens", "no"))
]


@pytest.mark.parametrize(("feature", "dialect"), CELLS)
def test_the_cell_holds(service: Service, feature: str, dialect: str) -> None:
    CHECKS[feature](Probe(service, dialect, MATRIX[feature][dialect]))


def test_every_row_has_its_check() -> None:
    assert list(MATRIX) == list(CHECKS)
    assert all(list(row) == list(BODIES) for row in MATRIX.values())
