"""What a request with tools becomes before a model sees it."""

from __future__ import annotations

from typing import Any

import httpx

from tests.gateway.service import Service

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
}
TURNS: list[Any] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
]


def test_a_template_without_tools_shows_them_in_plain_messages(service: Service, worker) -> None:
    """The tiny model's context is too short for them: /tokenize and /detokenize show the same."""
    headers = {"authorization": f"Bearer {service.keys.acme}"}
    with httpx.Client(base_url=service.url, headers=headers) as client:
        body = {"model": "tiny", "messages": TURNS, "tools": [WEATHER]}
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        text = client.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()["prompt"]
    system, *turns = text.split("<|im_start|>")[1:]
    assert system.startswith("system\n# Tools")
    assert '{"type": "function", "function": {"name": "get_weather", "description": ' in system
    assert turns == [
        "user\nWeather?<|im_end|>\n",
        'assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n'
        "</tool_call><|im_end|>\n",
        "user\n<tool_response>\nrain\n</tool_response><|im_end|>\n",
        "assistant\n",
    ]
