"""vLLM's fields that decide about prompts, tokens and what is told of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.scripts import say
from tests.gateway.service import Service
from tests.gateway.templated import FIRST_ADDED, templated_service
from workers.wire.protocol import ThoughtBound, TokenRules

BEGIN, END = FIRST_ADDED, FIRST_ADDED + 1
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A model that thinks, with markers that are tokens."""
    folder = tmp_path_factory.mktemp("thinking")
    with templated_service(folder, added=("<think>", "</think>")) as service:
        yield service


@pytest.mark.parametrize("field", ["thinking_token_budget", "thinking_budget"])
def test_a_chat_bounds_its_thought(thinking: Service, field: str) -> None:
    thinking.worker.script = say("ok")
    with thinking.client() as client:
        for budget, rules in ((7, TokenRules(thought=ThoughtBound(7, BEGIN, END))), (-1, None)):
            client.chat.completions.create(model="tiny", messages=CHAT, extra_body={field: budget})
            assert thinking.worker.requests[-1].params.rules == rules
        with pytest.raises(openai.BadRequestError, match="differ"):
            client.chat.completions.create(
                model="tiny",
                messages=CHAT,
                extra_body={"thinking_budget": 1, "thinking_token_budget": 2},
            )


def test_messages_bound_their_thought(thinking: Service, service: Service) -> None:
    """Where the markers are no tokens it is dropped and named; a chat is refused."""
    asked: Any = {"type": "enabled", "budget_tokens": 1024}
    body: Any = {"model": "tiny", "max_tokens": 9, "messages": CHAT, "thinking": asked}
    dropped: list[str | None] = []
    for each in (thinking, service):
        each.worker.script = say("ok")
        with each.client() as client:
            url = str(client.base_url).removesuffix("/v1/")
            anthropics = anthropic.Anthropic(base_url=url, api_key=client.api_key)
            raw = anthropics.messages.with_raw_response.create(**body)
            dropped.append(raw.headers.get("loraplex-dropped"))
    assert dropped == [None, "thinking.budget_tokens"]
    bound = ThoughtBound(1024, BEGIN, END)
    assert thinking.worker.requests[-1].params.rules == TokenRules(thought=bound)


def test_thoughts_without_tokens_of_their_own_cannot_be_bounded(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        templated_service(tmp_path_factory.mktemp("spelled")) as service,
        service.client() as client,
        pytest.raises(openai.BadRequestError, match="no tokens of their own") as refusal,
    ):
        client.chat.completions.create(
            model="tiny", messages=CHAT, extra_body={"thinking_token_budget": 5}
        )
    assert refusal.value.param == "thinking_token_budget"


def test_the_grammar_of_the_answer_begins_after_a_bounded_thought(thinking: Service) -> None:
    thinking.worker.script = say("ok")
    with thinking.client() as client:
        client.chat.completions.create(
            model="tiny",
            messages=CHAT,
            extra_body={"thinking_token_budget": 5, "guided_json": {"type": "integer"}},
        )
    request = thinking.worker.requests[-1]
    assert request.params.rules == TokenRules(thought=ThoughtBound(5, BEGIN, END))
    assert "thought" in json.loads(request.grammar)["grammars"][0]["lark_grammar"]
