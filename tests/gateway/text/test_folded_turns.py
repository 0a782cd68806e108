"""Agents' turns that a chat template refuses are folded; the prompts of all others stay the same in
every byte.

`agent_renders.json` has the digest of each turn's prompt as it was before turns were folded, and
null where the template refused, or left out an instruction.
"""

from __future__ import annotations

import json
import random
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.exceptions import InvalidRequest
from gateway.request import Conversation, MadeCall, Message, Tool
from gateway.text.chat_template import FOLDED_TURNS, HIDDEN_TURNS, ChatTemplate, Rendered
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
FAMILIES_BY_NAME = {path.stem: path for path in FAMILIES}
KNOWS_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"


def render(source: str, conversation: Conversation) -> Rendered:
    return ChatTemplate(source, SPECIAL).render(conversation)


@pytest.mark.parametrize("path", FAMILIES, ids=[path.stem for path in FAMILIES])
def test_what_was_accepted_stays_and_nothing_is_refused(path: Path) -> None:
    before = BEFORE[path.stem]
    assert before.keys() == TURNS.keys()
    for name, conversation in TURNS.items():
        text, change = render(path.read_text(), conversation)
        assert (change == FOLDED_TURNS) is (before[name] is None), name
        assert before[name] in (None, sha256(text.encode()).hexdigest()[:16]), name
        # What comes of the first system message and of calls with a text, templates decide.
        for message in conversation.messages[1:] if change else ():
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
    assert render(ALTERNATING, Conversation(messages)) == (prompt, FOLDED_TURNS)


def test_a_template_without_a_system_gets_its_tools_from_the_user() -> None:
    text, change = render(ALTERNATING, Conversation([TASK], TOOLS))
    assert change and text.startswith("[user # Tools") and text.endswith(f"{TASK.content}]")


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
    text, change = render(source, Conversation([calling, READ_RESULT, stray, RESULT, THEN]))
    assert change and text == (
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
    text, change = render(source, Conversation(turns, TOOLS))
    assert change and "[assistant2][tool0]" in text and "[user0]Be careful." in text


def test_what_a_template_refuses_in_each_form_is_refused_in_its_words() -> None:
    with pytest.raises(InvalidRequest, match="I am tired"):
        render("{{ raise_exception('I am tired') }}", Conversation([BRIEF, TASK, CALLED, THEN]))


def test_a_template_that_wants_contents_as_parts_gets_them() -> None:
    """Templates of models with images do. They leave out a content that is a text."""
    source = """{% for m in messages %}{% if m.role == 'system' %}{{ m.content[0].text.upper() }}
{% endif %}[{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}]{% endfor %}"""
    text, change = render(source, Conversation([BRIEF, TASK]))
    assert (text, change) == (f"{BRIEF.content.upper()}\n[{BRIEF.content}][{TASK.content}]", "")
    begun = Conversation([TASK, DONE], add_generation_prompt=False, continue_final_message=True)
    assert render(source, begun).text == f"[{TASK.content}][{DONE.content}"


SHOW = "{{ '[' ~ m.role ~ ' ' ~ m.content ~ ']' }}"
SHOW_CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
LOSING: dict[str, str] = {
    "user and assistant": "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    + SHOW
    + "{% endif %}{% endfor %}",
    "user": "{% for m in messages if m.role == 'user' %}" + SHOW + "{% endfor %}",
    "system first": "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    + SHOW
    + "{% endif %}{% endfor %}",
    "last": "{{ messages[-1].content }}",
    "the last four": "{% for m in messages[-4:] %}" + SHOW + "{% endfor %}",
    "tools counted": "{{ tools | length if tools else '' }}{% for m in messages %}"
    + SHOW
    + SHOW_CALLS
    + "{% endfor %}",
    "tools without a system": "{% if messages[0].role != 'system' and tools %}{{ tools | tojson }}"
    + "{% endif %}{% for m in messages %}"
    + SHOW
    + "{% endfor %}",
    "tools without results": KNOWS_TOOLS
    + "{% for m in messages if m.role != 'tool' %}"
    + SHOW
    + SHOW_CALLS
    + "{% endfor %}",
    "system at the end": "{% set s = namespace(text='') %}{% for m in messages %}"
    + "{% if m.role == 'system' %}{% set s.text = m.content %}{% else %}"
    + "{% if loop.last and m.role == 'user' %}{{ s.text }}{% endif %}"
    + SHOW
    + "{% endif %}{% endfor %}",
}
"""Templates that leave out some turns without refusing them."""


def any_conversation(rng: random.Random) -> Conversation:
    """Turns in any order; each text occurs once."""
    messages: list[Message] = []
    for number in range(rng.randrange(1, 9)):
        kind = rng.choice(("system", "user", "user", "assistant", "call"))
        text = f"{rng.choice(('word', 'Two words', 'a  b'))} {number}{rng.randrange(10**6)}"
        if kind == "call":
            calls = [MadeCall(f"call{number}{n}", "run", {}) for n in range(rng.choice((1, 1, 2)))]
            messages.append(Message("assistant", calls=calls))
            messages += [Message("tool", f"{text} {c.id}", call_id=c.id) for c in calls]
        else:
            messages.append(Message(kind, text))
    if not any(message.role == "user" for message in messages):
        messages.append(Message("user", "the task"))
    tools = [Tool(name=name) for name in ("run", "look_up_parcel")] if rng.random() < 0.5 else []
    return Conversation(messages, tools)


@pytest.mark.parametrize("name", [*LOSING, *(path.stem for path in FAMILIES)])
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_every_instruction_and_result_is_in_the_prompt(name: str, seed: int) -> None:
    template = compiled(LOSING[name] if name in LOSING else FAMILIES_BY_NAME[name].read_text())
    conversation = any_conversation(random.Random(seed))
    text, change = template.render(conversation)
    for message in conversation.messages:
        assert message.role == "assistant" or message.content in text
    for tool in conversation.tools:
        assert tool.name in text
    assert change in ("", FOLDED_TURNS)


@cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL)


def test_a_text_that_occurs_elsewhere_by_chance_does_not_count() -> None:
    turns = [Message("system", "No"), Message("user", "Nothing 4"), DONE, Message("user", "4")]
    text, change = compiled(LOSING["user"]).render(Conversation(turns))
    assert change == FOLDED_TURNS and text == "[user No\n\nNothing 4][user 4]"


def test_turns_that_no_form_shows_are_named() -> None:
    rendered = render("{{ messages | length }} turns", Conversation([BRIEF, TASK]))
    assert rendered == ("2 turns", HIDDEN_TURNS)


def test_a_long_conversation_that_is_shown_is_rendered_once() -> None:
    """Whether a template shows turns is found out once for conversations of a kind."""
    template = compiled(FAMILIES_BY_NAME["qwen3"].read_text())
    turns = [BRIEF, *[TASK, DONE] * 3, TASK]
    template.render(Conversation(turns))
    num_renders = 0
    prompt = template._prompt

    def count(conversation: Conversation) -> str:
        nonlocal num_renders
        num_renders += 1
        return prompt(conversation)

    template._prompt = count  # pyright: ignore[reportAttributeAccessIssue]
    for length in range(4, 40):
        template.render(Conversation([BRIEF, *[TASK, DONE] * length, TASK]))
    assert num_renders == 36


@pytest.mark.parametrize("role", ["control", "document", "context"])
def test_a_role_that_the_template_names_is_rendered(role: str) -> None:
    source = "{% for m in messages %}{% if m.role == '" + role + "' %}<doc>{{ m.content }}</doc>"
    source += "{% else %}" + SHOW + "{% endif %}{% endfor %}"
    turns = [Message(role, "the page"), TASK]
    assert render(source, Conversation(turns)) == (f"<doc>the page</doc>[user {TASK.content}]", "")
    with pytest.raises(InvalidRequest, match=f"a role that .* names; got '{role}'"):
        render(LOSING["user"], Conversation(turns))
