"""Describes tools as JSON in plain messages, for chat templates that do not render tools.

The format is that of Hermes and Qwen 2.5, which many other models have seen in training.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import msgspec

from gateway.conversation import Conversation
from gateway.generation_request import Tool
from gateway.messages import MadeCall, Message

DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

CALL = "<tool_call>\n{}\n</tool_call>"


def in_plain_messages(conversation: Conversation) -> Conversation:
    """Returns the conversation as plain messages. The system message describes the tools, the
    assistant's messages have their calls as text, and the user's messages have the results."""
    messages: list[Message] = []
    for is_result, turns in groupby(conversation.messages, lambda turn: turn.role == "tool"):
        if is_result:
            # Consecutive results share one message, because some templates require alternating
            # turns.
            results = [f"<tool_response>\n{turn.content}\n</tool_response>" for turn in turns]
            messages.append(Message("user", "\n".join(results)))
        else:
            messages += [_with_calls_as_text(turn) if turn.calls else turn for turn in turns]
    if conversation.tools:
        messages = _with_description(messages, conversation.tools)
    return msgspec.structs.replace(conversation, messages=messages, tools=[])


def _with_calls_as_text(message: Message) -> Message:
    calls = [CALL.format(_json(_shown(call))) for call in message.calls]
    content = "\n".join([*([message.content] if message.content else []), *calls])
    return msgspec.structs.replace(message, content=content, calls=[])


def _with_description(messages: list[Message], tools: list[Tool]) -> list[Message]:
    lines = [_json(tool.for_template()) for tool in tools]
    text = DESCRIPTION.format(tools="\n".join(lines))
    if messages[0].role != "system":
        return [Message("system", text), *messages]
    first = msgspec.structs.replace(messages[0], content=f"{messages[0].content}\n\n{text}")
    return [first, *messages[1:]]


def _shown(call: MadeCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
