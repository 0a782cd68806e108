"""Fields of a Responses object that repeat the request or report the sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.dialects.constraints import JsonObjectFormat
from gateway.dialects.history import Json, as_list, as_object
from gateway.dialects.responses_fields import (
    Reasoning,
    ResponsesRequest,
    TextConfig,
)
from workers.wire.protocol import SamplingParams

FUNCTION_KEYS = ("name", "description", "parameters", "strict")


def echoed(body: ResponsesRequest, used: SamplingParams) -> dict[str, Any]:
    """Returns the fields that are the same in the whole answer and in each event. `used`: sampling
    parameters, including defaults of the adapter and the base model."""
    reasoning = body.reasoning or Reasoning()
    return {
        "background": False,
        "frequency_penalty": used.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": used.presence_penalty,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summarises},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": used.temperature,
        "text": {"format": _text_format(body.text)},
        "tool_choice": body.tool_choice or "auto",
        "tools": _tools(body.tools or ()),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": used.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _text_format(text: TextConfig | None) -> Any:
    match text and text.format:
        case None | JsonObjectFormat(schema=None) as format:
            return {"type": "json_object" if format else "text"}
        case format:
            return format


def _tools(given: Sequence[Json]) -> list[dict[str, Any]]:
    """Returns the supported tools: functions, and namespaces of functions."""
    shown: list[dict[str, Any]] = []
    for tool in given:
        match tool.get("type"):
            case "function":
                shown.append(_function(tool))
            case "namespace":
                nested = _tools(list(map(as_object, as_list(tool.get("tools")))))
                description = tool.get("description") or ""
                shown.append({**_of_kind(tool), "description": description, "tools": nested})
            case _:
                pass
    return shown


def _function(tool: Json) -> dict[str, Any]:
    return {**_of_kind(tool), **{key: tool.get(key) for key in FUNCTION_KEYS}}


def _of_kind(tool: Json) -> dict[str, Any]:
    return {"type": tool.get("type"), "name": tool.get("name")}
