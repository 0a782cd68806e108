"""Agents' turns that a chat template refuses are folded; the prompts of all others stay the same in
every byte.

`agent_renders.json` has the digest of each turn's prompt as it was before turns were folded, and
null where the template refused.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from gateway.exceptions import InvalidRequest
from gateway.request import Conversation, Message
from gateway.text.chat_template import ChatTemplate, Rendered
from gateway.text.template_budget import steps_for
from tests.gateway.text.agent_turns import (
    BRIEF,
    CALLED,
    CAREFUL,
    DONE,
    READ,
    READ_RESULT,
    RESULT,
    RUN,
    TASK,
    THEN,
    TOOLS,
    TURNS,
)
from tests.gateway.text.test_chat_templates import FAMILIES, SPECIAL

BEFORE: dict[str, dict[str, str | None]] = json.loads(
    (Path(__file__).parent / "agent_renders.json").read_text()
)
ALTERNATING = """
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('turns must alternate') }}
    {%- endif %}
    {{- '[' ~ m.role ~ ' ' ~ m.content ~ ']' }}
{%- endfor %}"""
"""No system, and no two turns of one role."""
KNOWS_TOOLS = "{% if tools %}{{ tools | length }} tools{% endif %}"


def render(source: str, conversation: Conversation) -> Rendered:
    steps = steps_for(len(conversation.messages), conversation.num_chars)
    return ChatTemplate(source, SPECIAL).render(conversation, steps=steps)


@pytest.mark.parametrize("path", FAMILIES, ids=[path.stem for path in FAMILIES])
def test_what_was_accepted_stays_and_nothing_is_refused(path: Path) -> None:
    before = BEFORE[path.stem]
    assert before.keys() == TURNS.keys()
    for name, conversation in TURNS.items():
        text, is_folded = render(path.read_text(), conversation)
        assert is_folded is (before[name] is None), name
        assert before[name] in (None, sha256(text.encode()).hexdigest()[:16]), name
        # What comes of the first system message and of calls with a text, templates decide.
        for message in conversation.messages[1:] if is_folded else ():
            assert message.calls or message.content.strip() in text, name
            assert all(call.name in text for call in message.calls), name


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([BRIEF, TASK], "[user BRIEF\n\nTASK]"),
        ([BRIEF, CAREFUL], "[user BRIEF\nCAREFUL]"),
        ([TASK, CAREFUL, DONE], "[user TASK\nCAREFUL][assistant DONE]"),
        ([TASK, DONE, CAREFUL, THEN], "[user TASK][assistant DONE][user CAREFUL\nTHEN]"),
        ([DONE, THEN], "[user ][assistant DONE][user THEN]"),
        ([TASK, DONE, DONE], "[user TASK][assistant DONE\nDONE]"),
    ],
)
def test_turns_of_a_template_that_wants_them_to_alternate(
    messages: list[Message], prompt: str
) -> None:
    for name, message in {
        "BRIEF": BRIEF, "CAREFUL": CAREFUL, "TASK": TASK, "DONE": DONE, "THEN": THEN
    }.items():  # fmt: skip
        prompt = prompt.replace(name, message.content)
    assert render(ALTERNATING, Conversation(messages)) == (prompt, True)


def test_a_template_without_a_system_gets_its_tools_from_the_user() -> None:
    text, is_folded = render(ALTERNATING, Conversation([TASK], TOOLS))
    assert is_folded and text.startswith("[user # Tools") and text.endswith(f"{TASK.content}]")


def test_calls_that_are_parted_keep_their_results() -> None:
    """Results may come in any order; one that belongs to no call stands with the last."""
    source = (
        KNOWS_TOOLS
        + """{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}
{{- raise_exception('one call') }}{% endif %}[{{ m.role }} {{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}]{% endfor %}"""
    )
    calling = Message("assistant", "So: ", calls=[RUN, READ])
    stray = Message("tool", "stray", call_id="elsewhere")
    text, is_folded = render(source, Conversation([calling, READ_RESULT, stray, RESULT, THEN]))
    assert is_folded and text == (
        f"[assistant So: run][tool {RESULT.content}][assistant read][tool {READ_RESULT.content}]"
        f"[tool stray][user {THEN.content}]"
    )


def test_the_mildest_form_is_taken() -> None:
    """A template that wants its system at the start keeps two calls of one turn."""
    source = (
        KNOWS_TOOLS
        + """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('a system comes first') }}{% endif %}
{{- '[' ~ m.role ~ (m.tool_calls or []) | length ~ ']' }}{{ m.content }}{% endfor %}"""
    )
    calling = Message("assistant", calls=[RUN, READ])
    turns = [BRIEF, TASK, CAREFUL, calling, RESULT, READ_RESULT]
    text, is_folded = render(source, Conversation(turns, TOOLS))
    assert is_folded and "[assistant2][tool0]" in text and "[user0]Be careful." in text


def test_what_a_template_refuses_in_each_form_is_refused_in_its_words() -> None:
    with pytest.raises(InvalidRequest, match="I am tired"):
        render("{{ raise_exception('I am tired') }}", Conversation([BRIEF, TASK, CALLED, THEN]))


def test_a_form_that_leaves_the_task_out_is_none() -> None:
    """As templates do that want contents as a list of parts."""
    source = """{% for m in messages %}{% if m.role == 'system' %}{{ m.content[0].text.upper() }}
{% endif %}[{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}]{% endfor %}"""
    with pytest.raises(InvalidRequest, match="no attribute 'text'"):
        render(source, Conversation([BRIEF, TASK]))
