"""The schema of OpenAI's Responses, as its official client has it and as Open Responses requires
it: no key is missing, and none is there that the schema does not have."""

from __future__ import annotations

from typing import Any, cast

import pydantic
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

REQUIRED = frozenset(
    (
        *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
        *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
        *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty"),
        *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
        *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier"),
        *("metadata", "safety_identifier", "prompt_cache_key"),
    )
)
"""Keys that Open Responses requires of a response."""
NEVER_NULL = (
    *("background", "frequency_penalty", "metadata", "output", "parallel_tool_calls"),
    *("presence_penalty", "service_tier", "store", "temperature", "text", "tools", "top_p"),
)
FUNCTION = {"type", "name", "description", "parameters", "strict"}
NOT_IN_CLIENT = {
    "Response": {"frequency_penalty", "presence_penalty", "store"},
    # Those of a stream's pieces have the bytes that those of a whole text have.
    "Logprob": {"bytes"},
    "LogprobTopLogprob": {"bytes"},
    # Some versions of the client have it.
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},
    "ResponseErrorEvent": {"error"},
}
"""Keys that the official client's types lack, by the name of the type."""
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def check_event(data: dict[str, Any]) -> Any:
    """Returns the event as the official client reads it. Raises an error if it is not as the schema
    has it."""
    if "response" in data:
        check_response(data["response"])
    event = EVENT.validate_python(data)
    assert event.type == data["type"]
    _check_known(event)
    return event


def check_response(data: dict[str, Any]) -> None:
    """Raises an error if a response is not as the schema has it."""
    assert data.keys() >= REQUIRED, REQUIRED - data.keys()
    assert all(data[name] is not None for name in NEVER_NULL)
    assert (data["completed_at"] is None) == (data["status"] != "completed")
    for tool in data["tools"]:
        for function in tool.get("tools", [tool]):
            assert function.keys() == FUNCTION
    _check_known(Response.model_validate(data))


def _check_known(value: Any) -> None:
    """Raises an error if an object has a key that its type does not have."""
    if isinstance(value, list):
        for each in cast(list[Any], value):
            _check_known(each)
    if not isinstance(value, pydantic.BaseModel):
        return
    kind = type(value)
    unknown = set(value.model_extra or ()) - NOT_IN_CLIENT.get(kind.__name__, set())
    assert not unknown, f"{kind.__name__} has no {unknown}"
    for name in kind.model_fields:
        _check_known(getattr(value, name))
