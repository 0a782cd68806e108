"""vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.scripts import ids

MESSAGES: list[Any] = [{"role": "user", "content": "Hi é"}]


def post(client: openai.OpenAI, path: str, **body: Any) -> dict[str, Any]:
    """At the root, where vLLM has them."""
    url = str(client.base_url).removesuffix("/v1/") + path
    return client.post(url, body={"model": "tiny", **body}, cast_to=dict[str, Any])  # pyright: ignore


def test_a_text_and_back(client: openai.OpenAI) -> None:
    answer = post(client, "/tokenize", prompt="Hi é")
    tokens = ids("Hi é")
    expected = {"count": 5, "max_model_len": 128, "tokens": tokens, "token_strs": None}
    assert answer == expected
    assert post(client, "/detokenize", tokens=tokens) == {"prompt": "Hi é"}


def test_token_strings_are_the_vocabulary_s(client: openai.OpenAI) -> None:
    answer = post(client, "/tokenize", prompt="Hi é", return_token_strs=True)
    assert answer["token_strs"] == ["H", "i", "Ġ", "Ã", "©"]


def test_messages_are_what_a_chat_sends(client: openai.OpenAI) -> None:
    answer = post(client, "/tokenize", messages=MESSAGES, return_token_strs=True)
    shown = post(client, "/detokenize", tokens=answer["tokens"])["prompt"]
    assert shown == "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"
    assert answer["token_strs"][0] == "<|im_start|>"
    bare = post(client, "/tokenize", messages=MESSAGES, add_generation_prompt=False)
    assert bare["tokens"] == answer["tokens"][: bare["count"]]
    open_ended = [*MESSAGES, {"role": "assistant", "content": "He"}]
    going_on = post(client, "/tokenize", messages=open_ended, continue_final_message=True)
    ending = post(client, "/detokenize", tokens=going_on["tokens"][-3:])["prompt"]
    assert ending == "\nHe"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({}, "prompt"),
        (
            {
                "messages": MESSAGES,
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        ({"prompt": "a", "chat_template": "{{ messages }}"}, "chat_template"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        post(client, "/tokenize", **body)
    assert refused.value.param == param
