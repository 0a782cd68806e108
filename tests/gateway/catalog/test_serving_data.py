"""What a version brings besides its weights: chat template, stop strings, defaults, metadata."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from gateway.dispatch.run import sampling_params
from gateway.request import Request
from gateway.text.tokenizer import SamplingDefaults
from store.records import CatalogSnapshot, GenerationDefaults, ServingData
from tests.gateway.scripts import say, spelled
from tests.gateway.service import Service, snapshot

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
OWN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}>"
)

BROUGHT = {
    3: ServingData(chat_template="{{ messages }}"),
    7: ServingData(
        chat_template=OWN_TEMPLATE,
        stop=("END", "###"),
        stop_token_ids=(5,),
        tool_format="llama_json",
        defaults=GenerationDefaults(
            temperature=0.25, top_k=5, presence_penalty=0.5, max_tokens=30, repetition_penalty=1.5
        ),
        metadata={"ticket": "OPS-1"},
    ),
}


def brought(service: Service, generation: int, *approved: int) -> CatalogSnapshot:
    """acme's versions bring theirs; the templates of those given may run."""
    plain = snapshot(service.keys.records, generation=generation)
    versions = tuple(
        msgspec.structs.replace(v, serving=BROUGHT[v.version]) if v.tenant_id == "ten_acme" else v
        for v in plain.versions
    )
    digests = frozenset(BROUGHT[number].template_digest or "" for number in approved)
    return msgspec.structs.replace(plain, versions=versions, approved_templates=digests)


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[Service]:
    service = Service(store)
    service.start()
    catalog = brought(service, 2, 7)
    service.feed(catalog)
    yield service
    service.stop()


def test_an_approved_template_is_rendered(service: Service, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="support-bot", messages=HELLO)
    assert spelled(service.worker.requests[-1].tokens) == "<|bos|>[user] Hi>"
    answer = service.post("/tokenize", {"model": "support-bot", "messages": HELLO})
    assert spelled(answer.json()["tokens"]) == "<|bos|>[user] Hi>"


def test_another_is_refused_by_name_and_completions_are_served(
    service: Service, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.ConflictError, match="an admin must approve it") as refused:
        client.chat.completions.create(model="support-bot@3", messages=HELLO)
    assert refused.value.code == "template_not_approved"
    # The official client tries conflicts again unless told not to.
    assert refused.value.response.headers["x-should-retry"] == "false"
    answer = service.post("/tokenize", {"model": "support-bot@3", "messages": HELLO})
    assert answer.json()["error"]["code"] == "template_not_approved"
    assert client.completions.create(model="support-bot@3", prompt="Hi").choices[0].text


def test_end_tokens_are_added_to_those_of_the_request(
    service: Service, client: openai.OpenAI
) -> None:
    for extra, ids in (({}, (5,)), ({"stop_token_ids": [9]}, (9, 5)), ({"ignore_eos": True}, ())):
        client.completions.create(model="support-bot", prompt="Hi", extra_body=extra)
        assert service.worker.requests[-1].params.stop_token_ids == ids


def test_approval_takes_effect(service: Service, client: openai.OpenAI) -> None:
    both, one = brought(service, 3, 3, 7), brought(service, 4, 7)
    service.call(lambda: service.source.feed(both))
    try:
        service.wait_for(lambda: service.gateway.catalog.current.generation == 3)
        client.chat.completions.create(model="support-bot@3", messages=HELLO)
        assert "'content': 'Hi'" in spelled(service.worker.requests[-1].tokens)
    finally:
        service.feed(one)


def test_a_response_tells_what_was_used(client: openai.OpenAI) -> None:
    """The version's defaults, the base model's and OpenAI's, in the events too."""
    asked: dict[str, Any] = {"model": "support-bot", "input": "Hi", "top_p": 0.5}
    whole = client.responses.create(**asked)
    created, *_ = client.responses.create(**asked, stream=True)
    assert created.type == "response.created"
    for answer in (whole, created.response):
        assert (answer.temperature, answer.top_p) == (0.25, 0.5)
        told = answer.model_extra or {}
        assert (told["presence_penalty"], told["frequency_penalty"]) == (0.5, 0)


@pytest.mark.parametrize(
    ("asked", "text"),
    [(None, "before "), ("b", ""), (["nothing", "e "], "befor"), (["###"], "before ")],
)
def test_stop_strings_add_to_the_request_s(
    service: Service, client: openai.OpenAI, asked: Any, text: str
) -> None:
    service.worker.script = say("before END after ### more")
    answer = client.completions.create(model="support-bot", prompt="Hi", max_tokens=40, stop=asked)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")


def test_calls_are_read_in_the_format_that_is_named(
    service: Service, client: openai.OpenAI
) -> None:
    service.worker.script = say('{"name": "t", "parameters": {}}')
    tool: Any = {"type": "function", "function": {"name": "t"}}
    answer = client.chat.completions.create(
        model="support-bot", messages=HELLO, tools=[tool], max_tokens=40
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "t"


def test_defaults_are_taken_for_what_is_left_out(service: Service, client: openai.OpenAI) -> None:
    client.completions.create(model="support-bot", prompt="Hi")
    params = service.worker.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 5, 1.0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.0)
    assert (params.repetition_penalty, params.max_tokens) == (1.5, 30)
    client.completions.create(
        model="support-bot",
        prompt="Hi",
        temperature=0,
        top_p=0,
        presence_penalty=0,
        max_tokens=9,
        extra_body={"top_k": 0, "repetition_penalty": 1.0},
    )
    params = service.worker.requests[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 0, 9)
    assert params.top_p == 0.0
    assert (params.presence_penalty, params.repetition_penalty) == (0.0, 1.0)
    client.completions.create(model="tiny", prompt="Hi")
    assert service.worker.requests[-1].params.max_tokens == 16


def test_defaults_come_before_the_base_model_s() -> None:
    """Of its generation_config.json."""
    base = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=40)
    asked = Request(model="support-bot", prompts=["Hi"])
    params = sampling_params(asked, GenerationDefaults(temperature=0.1, top_k=0), base)
    assert (params.temperature, params.top_p, params.top_k) == (0.1, 0.9, 0)


def test_the_cards_show_it_to_those_who_may_use_it(service: Service, client: openai.OpenAI) -> None:
    models = {model.id: model.model_dump() for model in client.models.list()}
    assert models["support-bot"]["adapter"] == {
        "version": 7,
        "canary": None,
        "has_chat_template": True,
        "is_chat_template_approved": True,
        "stop": ["END", "###"],
        "stop_token_ids": [5],
        "defaults": {
            "temperature": 0.25,
            "top_k": 5,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.5,
            "max_tokens": 30,
        },
        "metadata": {"ticket": "OPS-1"},
        "pooling": None,
        "tool_format": "llama_json",
    }
    assert models["tiny"]["adapter"] is None
    card = client.models.retrieve("support-bot@3").model_dump()["adapter"]
    assert (card["has_chat_template"], card["is_chat_template_approved"]) == (True, False)
    with service.client(service.keys.globex) as other:
        shown = other.models.retrieve("support-bot").model_dump()["adapter"]
        assert (shown["stop"], shown["metadata"], shown["has_chat_template"]) == ([], {}, False)
        assert "OPS-1" not in other.models.with_raw_response.list().text
