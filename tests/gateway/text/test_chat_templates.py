"""Chat templates do bounded work, and the published ones render as in transformers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.exceptions import InvalidRequest
from gateway.request import Conversation, MadeCall, Message, Tool
from gateway.text.chat_template import ChatTemplate
from gateway.text.long_texts import LongTexts
from gateway.text.template_budget import BASE_STEPS, STEPS_PER_MESSAGE, steps_for
from gateway.text.tokenizer import STEPS_ON_LOOP, ModelTokenizer
from tests.gateway.text.test_tokenizer import changed

FAMILIES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [
    {"role": "user", "content": "  Grüße & <b>\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok "},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "漢字" * 100},
    {"role": "user", "content": "{{ 7 * 7 }} {% raise %}"},
]
SYSTEM = {"role": "system", "content": "Be short."}
LONG_CHAT = TURNS[:4] * 1023 + TURNS[:1]
CONVERSATIONS = [TURNS[:1], TURNS, [SYSTEM, *TURNS], LONG_CHAT]
CHAT = Conversation([Message("user", "Hi"), Message("assistant", "ok")])
MAX_CPU_S = 5.0
"""Of one refused rendering; each attack takes minutes, or gigabytes, without the budget."""

GROWN = "{% set ns = namespace(x='ab') %}{% for i in range(24) %}{% set ns.x = ns.x ~ ns.x %}"
SHARED = "{% set ns = namespace(x=['a', 'b'], y=['a', 'b']) %}{% for i in range(45) %}"
SHARED += "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
BIG = "{% set big = 'a' * 200000 %}"

HOSTILE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "a loop that leaves all out": "{% for a in range(99999) if 'x' in ('y' * 99) * 9 %}{% endfor %}"
    * 9,
    "a recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}"
    + "{% for b in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "calls that double": "".join(
        f"{{% macro m{i}() %}}{{{{ m{i + 1}() }}}}{{{{ m{i + 1}() }}}}{{% endmacro %}}"
        for i in reversed(range(40))
    )
    + "{% macro m40() %}x{% endmacro %}{{ m0() }}",
    "blocks that double": "".join(
        f"{{% block b{i} %}}{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}{{% endblock %}}"
        for i in range(40)
    )
    + "{% block b40 %}x{% endblock %}",
    "callers that double": "{% macro m(n) %}{% if n %}{% call m(n - 1) %}{% endcall %}"
    "{% call m(n - 1) %}{% endcall %}{% endif %}{% endmacro %}{{ m(60) }}",
    "text that doubles": GROWN + "{{ ns.x }}{% endfor %}",
    "text that doubles by +": GROWN.replace("~", "+").replace("24", "60") + "{% endfor %}",
    "a chain of +": BIG + "{% set x = " + " + ".join(["big"] * 200) + " %}",
    "a list that doubles": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "text times a number": "{{ 'x' * 10 ** 9 }}",
    "a list times a number": "{{ ([0] * 10 ** 9) | length }}",
    "a tower of powers": "{{ 9 ** 9 ** 9 }}",
    "squares of squares": "{% set ns = namespace(x=9) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a shift by rounding": "{{ 5 | round(-1000000000) }}{{ 5 | int | round(-10 ** 9) | int }}",
    "a width by %": "{{ '%999999999d' % 1 }}",
    "a width with a key": "{{ '%(a(b))999999999d' % {'a(b)': 1} }}",
    "a width that is a value": "{{ '%*d' % (10 ** 9, 1) }}",
    "a width by a filter": "{{ '%999999999d' | format(1) }}",
    "a width by format": "{{ '{:>999999999}'.format(1) }}",
    "a width by format_map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "a width that format takes": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "fields that repeat": BIG + "{{ ('{0}' * 30000).format(big) }}",
    "keys that repeat": BIG + "{{ ('%(a)s' * 30000) % {'a': big} }}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "zfill": "{{ 'x'.zfill(10 ** 9) }}",
    "expandtabs": "{{ ('\t' * 9999).expandtabs(4000) }}",
    "translate": "{{ ('a' * 9999).translate({97: 'x' * 99999}) }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "fromkeys": "{{ {}.fromkeys(range(99999)) }}" * 99,
    "indent": "{{ ('\n' * 9999) | indent(4000) }}",
    "indent by text": BIG + "{{ ('a\n' * 9999) | indent(big) }}",
    "replace": BIG + "{{ big.replace('', big) }}",
    "the filter replace": BIG + "{{ big | replace('a', big) }}",
    "join": BIG + "{{ big.join('x' * 9999) }}",
    "the filter join": BIG + "{{ range(99999) | join(big) }}",
    "a sum of lists": "{{ ([[0] * 99] * 999) | sum(start=[]) }}",
    "slices": "{{ 'x' | slice(10 ** 9) | list }}",
    "batches that are filled": "{{ 'x' | batch(10 ** 9, 'y') | list }}",
    "lists of ranges": "{% for i in range(999) %}{% set x = range(99999) | list %}{% endfor %}",
    "filters on filters": "{% set ns = namespace(x=range(9)) %}{% for i in range(9999) %}"
    "{% set ns.x = ns.x | map('upper') %}{% endfor %}{{ ns.x | list }}",
    "map": "{% for i in range(999) %}{% set x = range(99999) | map('string') | last %}{% endfor %}",
    "select": "{% for i in range(999) %}{{ range(99999) | select('gt', 10 ** 9) | first }}"
    "{% endfor %}",
    "sort": "{% for i in range(999) %}{% set x = range(99999) | sort %}{% endfor %}",
    "slices of a long text": BIG + "{% for i in range(99999) %}{% set x = big[1:] %}{% endfor %}",
    "copies by a method": BIG + "{% for i in range(99999) %}{% set x = big.upper() %}{% endfor %}",
    "a search": BIG + "{% for i in range(99999) %}{% set x = 'b' in big %}{% endfor %}",
    "a search from the right": BIG + "{{ big.rfind('b' + big[:100000]) }}",
    "a split": BIG + "{{ big.rsplit('b' + big[:100000]) }}",
    "a comparison": SHARED + "{{ ns.x == ns.y }}",
    "a comparison of dicts": SHARED.replace("[ns.x, ns.x]", "{1: ns.x, 2: ns.x}").replace(
        "[ns.y, ns.y]", "{1: ns.y, 2: ns.y}"
    )
    + "{{ ns.x == ns.y }}",
    "a test of equality": SHARED + "{{ ns.x is eq(ns.y) }}",
    "membership": SHARED + "{{ ns.x in [ns.y] }}",
    "the index of": SHARED + "{{ [ns.x].index(ns.y) }}",
    "what changed": SHARED
    + "{% for i in range(2) %}{{ loop.changed([ns.x, ns.y][i]) }}{% endfor %}",
    "output of what is shared": SHARED + "{{ ns.x }}",
    "~ of what is shared": SHARED + "{% set t = ns.x ~ '' %}",
    "% of what is shared": SHARED + "{% set t = '%s' % (ns.x,) %}",
    "tojson of what is shared": SHARED + "{{ ns.x | tojson }}",
    "an indentation": "{{ [1] | tojson(indent=10 ** 9) }}",
    "separators": BIG + "{{ range(9) | list | tojson(separators=(big * 9, big * 9)) }}",
    "the hash of what is shared": "{% set ns = namespace(x=(1, 2)) %}{% for i in range(45) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {}[ns.x] }}",
    "keys that collide": "{% set x = {(1, 2): 3, messages: 4} %}",
    "lorem ipsum": "{{ lipsum(10 ** 6) }}",
    "output of a long text": BIG + "{% for i in range(99999) %}{{ big }}{% endfor %}",
    "output of the template's text": "{% for i in range(99999) %}" + "x" * 20000 + "{% endfor %}",
    "a long exception": BIG + "{{ raise_exception(big * 40) }}{{ raise_exception(big) }}",
    "a pattern for dates": "{{ strftime_now('%c' * 10 ** 6) }}",
    "a namespace of namespaces": "{% set ns = namespace(x=namespace()) %}{% for i in range(45) %}"
    "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x ~ ('x' * 10 ** 9) }}",
}


@pytest.mark.parametrize("path", FAMILIES, ids=[path.stem for path in FAMILIES])
@pytest.mark.parametrize("generates", [True, False])
def test_published_templates_render_as_in_transformers(path: Path, generates: bool) -> None:
    source = path.read_text()
    template = ChatTemplate(source, SPECIAL)
    num_refused = 0
    for chat in CONVERSATIONS:
        conversation = Conversation(
            [Message(**turn) for turn in chat], add_generation_prompt=generates
        )
        steps = steps_for(len(chat), conversation.num_chars)
        try:
            (expected,), _ = render_jinja_template(
                [chat], chat_template=source, add_generation_prompt=generates, **SPECIAL
            )
        except Exception:
            num_refused += 1
            assert template.render(conversation, steps=steps).change
        else:
            assert template.render(conversation, steps=steps) == (expected, "")
    assert num_refused <= 1


WITH_TOOLS = [path for path in FAMILIES if path.stem in ("qwen2.5", "qwen3")]


@pytest.mark.parametrize("path", WITH_TOOLS, ids=[path.stem for path in WITH_TOOLS])
def test_tools_calls_and_results_render_as_in_transformers(path: Path) -> None:
    """Calls have arguments that are an object."""
    source = path.read_text()
    tool = Tool(name="add", description="Adds.", parameters={"type": "object", "properties": {}})
    call = MadeCall("abcdefghi", "add", {"a": 1, "b": ["ü"]})
    messages = [
        Message("user", "2 + 2?"),
        Message("assistant", calls=[call]),
        Message("tool", "4", call_id="abcdefghi"),
        Message("assistant", "It is 4."),
        Message("user", "And 3 + 3?"),
    ]
    (expected,), _ = render_jinja_template(
        [[message.for_template() for message in messages]],
        tools=[tool.for_template()],
        chat_template=source,
        add_generation_prompt=True,
        enable_thinking=False,
        **SPECIAL,
    )
    conversation = Conversation(messages, [tool], template_arguments={"enable_thinking": False})
    template = ChatTemplate(source, SPECIAL)
    assert template.shows_tools and "Adds." in expected and "ü" in expected
    assert template.render(conversation, steps=STEPS_ON_LOOP).text == expected


@pytest.mark.parametrize("path", FAMILIES, ids=[path.stem for path in FAMILIES])
def test_an_answer_continues_the_last_message_as_in_transformers(path: Path) -> None:
    source = path.read_text()
    chat = [*TURNS[:1], {"role": "assistant", "content": "Once upon "}]
    (expected,), _ = render_jinja_template(
        [chat], chat_template=source, continue_final_message=True, **SPECIAL
    )
    conversation = Conversation(
        [Message(**turn) for turn in chat],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert ChatTemplate(source, SPECIAL).render(conversation, steps=STEPS_ON_LOOP).text == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token ~ messages[0].content ~ 7 }}",
        "{% macro turn(m) %}{{ m.role ~ ': ' ~ m.content }}{% endmacro %}{{ turn(messages[0]) }}",
        "{% set all %}{{ messages[0].role ~ '!' }}{% endset %}{{ all ~ '?' }}",
    ],
)
def test_texts_are_joined_as_in_transformers(source: str) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    (expected,), _ = render_jinja_template([chat], chat_template=source, **SPECIAL)
    conversation = Conversation([Message(**turn) for turn in chat])
    assert ChatTemplate(source, SPECIAL).render(conversation, steps=STEPS_ON_LOOP).text == expected


@pytest.mark.parametrize("path", FAMILIES, ids=[path.stem for path in FAMILIES])
def test_a_short_chat_is_rendered_within_the_steps_of_the_loop(path: Path) -> None:
    template = ChatTemplate(path.read_text(), SPECIAL)
    conversation = Conversation([Message(**turn) for turn in TURNS])
    assert template.render(conversation, steps=STEPS_ON_LOOP // 16).text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused(name: str) -> None:
    template = ChatTemplate(HOSTILE[name], SPECIAL)
    began = time.thread_time()
    with pytest.raises(InvalidRequest) as refusal:
        template.render(CHAT, steps=steps_for(len(CHAT.messages), 4))
    assert time.thread_time() - began < MAX_CPU_S
    assert len(refusal.value.message) < 1200


async def test_a_hostile_template_leaves_the_loop_free(tmp_path: Path) -> None:
    """Little of it runs on the loop's thread, and its caller reads why it is refused."""
    template = HOSTILE["nested loops"]
    tokenizer = ModelTokenizer(changed(tmp_path, chat_template=template), LongTexts())
    began = time.thread_time()
    with pytest.raises(InvalidRequest) as refusal:
        await tokenizer.render(CHAT, domain="acme")
    assert time.thread_time() - began < 0.5
    assert refusal.value.code == "template_budget_exceeded"
    steps = BASE_STEPS + STEPS_PER_MESSAGE * len(CHAT.messages) + 4
    assert str(steps) in refusal.value.message


async def test_a_long_conversation_is_rendered_beside_the_loop(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    tokenizer = ModelTokenizer(changed(tmp_path, chat_template=template), LongTexts())
    content: Any = "a" * (8 << 20)
    began = time.thread_time()
    rendered = await tokenizer.render(Conversation([Message("user", content)]), domain="acme")
    on_loop_s = time.thread_time() - began
    assert rendered.text == content.upper()
    began = time.thread_time()
    content.upper()
    assert on_loop_s < (time.thread_time() - began) + 0.05


@pytest.mark.parametrize(
    "template",
    [
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'x' as x %}",
        "{% autoescape true %}{% endautoescape %}",
        "{{ " + "9" * 40 + " }}",
    ],
)
async def test_what_has_no_budget_is_refused_by_name(tmp_path: Path, template: str) -> None:
    tokenizer = ModelTokenizer(changed(tmp_path), LongTexts())
    with pytest.raises(InvalidRequest, match=r"chat templates may not use|64 bits"):
        await tokenizer.render(CHAT, domain="", template=template)
