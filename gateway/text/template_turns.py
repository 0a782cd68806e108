"""Rewrites conversations for chat templates that do not render tools, or that refuse some turns or
leave them out.

Tools are described as JSON in plain messages, in the format of Hermes and Qwen 2.5, which many
other models have also seen in training. Agents send turns that many templates refuse, such as a
system message in the middle, two turns of one role in a row, or several calls in one turn. A
conversation is simplified only if a template refuses it or leaves out an instruction or a result,
so that other prompts do not change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import chain, groupby
from typing import Any

import msgspec

from gateway.request import Conversation, MadeCall, Message, Tool, in_turns

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
Fold = Callable[[Conversation], Conversation]


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
            messages += [_with_written_calls(turn) if turn.calls else turn for turn in turns]
    if conversation.tools:
        messages = _with_description(messages, conversation.tools)
    return msgspec.structs.replace(conversation, messages=messages, tools=[])


def _with_written_calls(message: Message) -> Message:
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


def folded(conversation: Conversation) -> Iterator[Conversation]:
    """Yields simplified forms of the conversation, in the order in which they should be tried.
    Omits a form that equals the one before it."""
    last = conversation
    for folds in FORMS:
        plainer = reduce(lambda form, fold: fold(form), folds, conversation)
        if plainer != last:
            yield plainer
        last = plainer


def _with_one_system(conversation: Conversation) -> Conversation:
    """Joins the system messages at the start. Converts each later system message to a user message
    at the same position or, if it interrupts the results of calls, after these results."""
    messages: list[Message] = []
    waiting: list[Message] = []
    for message in in_turns(conversation.messages, _are_systems):
        if message.role == "system" and messages:
            waiting.append(Message("user", message.content))
            continue
        if message.role != "tool":
            messages += waiting
            waiting = []
        messages.append(message)
    return _with(conversation, [*messages, *waiting])


def _alternating(conversation: Conversation) -> Conversation:
    """Joins consecutive turns of one role, and appends a user's turn to the tool result before it.
    Inserts an empty user turn if the first turn after the system messages is the assistant's."""
    turns = in_turns(conversation.messages, lambda last, turn: last.role == turn.role != "tool")
    messages: list[Message] = []
    for turn in turns:
        if turn.role == "assistant" and all(each.role == "system" for each in messages):
            messages.append(Message("user"))
        if turn.role == "user" and messages and messages[-1].role == "tool":
            messages[-1] = _joined(messages[-1], turn)
        else:
            messages.append(turn)
    return _with(conversation, messages)


def _with_single_calls(conversation: Conversation) -> Conversation:
    """Moves each call to its own turn, followed by the results of that call."""
    messages: list[Message] = []
    calling: Message | None = None
    for is_result, turns in groupby(conversation.messages, lambda turn: turn.role == "tool"):
        if not is_result:
            *before, last = turns
            messages += chain.from_iterable(map(_one_by_one, before))
            calling = last
            if len(last.calls) < 2:
                messages.append(last)
        elif calling is not None and len(calling.calls) > 1:
            messages += _one_by_one(calling, list(turns))
            calling = None
        else:
            messages += turns
    if calling is not None and len(calling.calls) > 1:
        messages += _one_by_one(calling)
    return _with(conversation, messages)


def _one_by_one(turn: Message, results: list[Message] | None = None) -> list[Message]:
    """Returns the turn with each of its calls in its own turn, followed by the results of that
    call. Results that match no call follow the last call."""
    if len(turn.calls) < 2:
        return [turn]
    rest = results or []
    messages: list[Message] = []
    for number, call in enumerate(turn.calls):
        calling = Message("assistant") if number else turn
        is_last = number == len(turn.calls) - 1
        own = [result for result in rest if is_last or result.call_id == call.id]
        rest = [result for result in rest if result not in own]
        messages += [msgspec.structs.replace(calling, calls=[call]), *own]
    return messages


def _with_described_tools(conversation: Conversation) -> Conversation:
    """Gives each tool that has no description its name as the description."""
    tools = [
        tool if tool.description else msgspec.structs.replace(tool, description=tool.name)
        for tool in conversation.tools
    ]
    return msgspec.structs.replace(conversation, tools=tools)


def _with_calls_as_text(conversation: Conversation) -> Conversation:
    """Writes calls and results as text. Keeps the tools, because answers are parsed in the format
    that the template describes to the model."""
    bare = msgspec.structs.replace(conversation, tools=[])
    return msgspec.structs.replace(in_plain_messages(bare), tools=conversation.tools)


def _without_system(conversation: Conversation) -> Conversation:
    """Moves the system message into the first user turn."""
    first, *others = conversation.messages
    if first.role != "system":
        return conversation
    messages = [Message("user", first.content), *others]
    if others and others[0].role == "user":
        messages = [_joined(messages[0], others[0]), *others[1:]]
    return _with(conversation, messages)


def _in_one_turn(conversation: Conversation) -> Conversation:
    """Writes all turns into one of the user, each after its role. Leaves the last turn as it is if
    the answer continues it."""
    messages = conversation.messages
    num_written = len(messages) - conversation.continue_final_message
    written = [f"{turn.role}: {turn.content}" for turn in messages[:num_written] if turn.content]
    last = messages[num_written:]
    return _with(conversation, [Message("user", "\n\n".join(written)), *last])


FORMS: tuple[tuple[Fold, ...], ...] = (
    (_with_one_system,),
    (_with_one_system, _alternating),
    (_with_one_system, _with_single_calls),
    (_with_one_system, _with_single_calls, _alternating, _with_described_tools),
    (_with_one_system, _with_calls_as_text, _alternating),
    (_with_one_system, _with_calls_as_text, _alternating, _without_system),
    (_with_one_system, _with_calls_as_text, _in_one_turn),
)
"""Simplified forms, in the order in which they are tried. Each form is a tuple of functions that
are applied to the conversation one after the other."""


def _with(conversation: Conversation, messages: list[Message]) -> Conversation:
    return msgspec.structs.replace(conversation, messages=messages)


def _are_systems(last: Message, message: Message) -> bool:
    return last.role == message.role == "system"


def _joined(first: Message, second: Message) -> Message:
    content = "\n\n".join([each.content for each in (first, second) if each.content])
    return msgspec.structs.replace(first, content=content)
