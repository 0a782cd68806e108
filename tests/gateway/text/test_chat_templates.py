"""Chat templates of adapters do bounded work, and the published ones render as in transformers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.exceptions import InvalidRequest
from gateway.request import Conversation, MadeCall, Message, Tool
from gateway.text.chat_template import ChatTemplate
from gateway.text.long_texts import LongTexts
from gateway.text.template_process import PROMPT_BYTES, RenderedChat, TemplateProcesses
from gateway.text.tokenizer import ModelTokenizer
from tests.gateway.text.agent_turns import TURNS as TURNS_OF_AGENTS
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
GROWN = "{% set ns = namespace(x='ab') %}{% for i in range(24) %}{% set ns.x = ns.x ~ ns.x %}"
SHARED = "{% set ns = namespace(x=['a', 'b'], y=['a', 'b']) %}{% for i in range(45) %}"
SHARED += "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
BIG = "{% set big = 'a' * 200000 %}"

HOSTILE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
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
    "text that doubles": GROWN + "{{ ns.x }}{% endfor %}",
    "a list that doubles": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "text times a number": "{{ 'x' * 10 ** 9 }}",
    "squares of squares": "{% set ns = namespace(x=9) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a shift by rounding": "{{ 5 | round(-1000000000) }}{{ 5 | int | round(-10 ** 9) | int }}",
    "a width by %": "{{ '%999999999d' % 1 }}",
    "a width by format": "{{ '{:>999999999}'.format(1) }}",
    "fields that repeat": BIG + "{{ ('{0}' * 30000).format(big) }}",
    "translate": "{{ ('a' * 9999).translate({97: 'x' * 99999}) }}",
    "fromkeys": "{{ {}.fromkeys(range(99999)) }}" * 99,
    "indent by text": BIG + "{{ ('a\n' * 9999) | indent(big) }}",
    "replace": BIG + "{{ big.replace('', big) }}",
    "join": BIG + "{{ big.join('x' * 9999) }}",
    "slices": "{{ 'x' | slice(10 ** 9) | list }}",
    "filters on filters": "{% set ns = namespace(x=range(9)) %}{% for i in range(9999) %}"
    "{% set ns.x = ns.x | map('upper') %}{% endfor %}{{ ns.x | list }}",
    "sort": "{% for i in range(999) %}{% set x = range(99999) | sort %}{% endfor %}",
    "slices of a long text": BIG + "{% for i in range(99999) %}{% set x = big[1:] %}{% endfor %}",
    "a comparison": SHARED + "{{ ns.x == ns.y }}",
    "the index of": SHARED + "{{ [ns.x].index(ns.y) }}",
    "output of what is shared": SHARED + "{{ ns.x }}",
    "tojson of what is shared": SHARED + "{{ ns.x | tojson }}",
    "an indentation": "{{ [1] | tojson(indent=10 ** 9) }}",
    "separators": BIG + "{{ range(9) | list | tojson(separators=(big * 9, big * 9)) }}",
    "the hash of what is shared": "{% set ns = namespace(x=(1, 2)) %}{% for i in range(45) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {}[ns.x] }}",
    "lorem ipsum": "{{ lipsum(10 ** 6) }}",
    "output of a long text": BIG + "{% for i in range(99999) %}{{ big }}{% endfor %}",
    "a long exception": BIG + "{{ raise_exception(big * 40) }}{{ raise_exception(big) }}",
    "a pattern for dates": "{{ strftime_now('%c' * 10 ** 6) }}",
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
        try:
            (expected,), _ = render_jinja_template(
                [chat], chat_template=source, add_generation_prompt=generates, **SPECIAL
            )
        except Exception:
            num_refused += 1
            assert template.render(conversation).change
        else:
            assert template.render(conversation) == (expected, "")
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
    assert template.render(conversation).text == expected


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
    assert ChatTemplate(source, SPECIAL).render(conversation).text == expected


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
    assert ChatTemplate(source, SPECIAL).render(conversation).text == expected


@pytest.fixture
def tokenizer(tmp_path: Path, processes: TemplateProcesses) -> ModelTokenizer:
    return ModelTokenizer(changed(tmp_path), LongTexts(), processes)


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_templates_are_bounded(tokenizer: ModelTokenizer, name: str) -> None:
    """Little of them runs in this process, and their callers read why they are refused."""
    began = time.thread_time()
    try:
        rendered = await tokenizer.render(CHAT, domain="acme", template=HOSTILE[name])
    except InvalidRequest as refusal:
        assert len(refusal.message) < 1200
        is_refused = refusal.code == "template_budget_exceeded"
        assert is_refused or "template refused: " in refusal.message
    else:
        assert name == "separators" and len(rendered.rendered.text) < PROMPT_BYTES
    assert time.thread_time() - began < 0.1


async def test_a_hostile_template_is_refused_beside_others(
    tokenizer: ModelTokenizer, processes: TemplateProcesses
) -> None:
    """The loop answers others meanwhile, a tenant waits for its own only, and what another process
    renders afterwards is right."""

    async def hostile() -> None:
        with pytest.raises(InvalidRequest) as refusal:
            await tokenizer.render(CHAT, domain="acme", template=HOSTILE["nested loops"])
        assert refusal.value.code == "template_budget_exceeded"

    attacks = asyncio.gather(*[hostile() for _ in range(3)])
    await asyncio.sleep(0.05)
    for number in range(20):
        rendered = await tokenizer.render(CHAT, domain="globex", template=f"{number}")
        assert rendered.rendered.text == str(number)
    assert not attacks.done()
    began = time.perf_counter()
    await asyncio.sleep(0.01)
    assert time.perf_counter() - began < 0.5
    await attacks


@pytest.mark.parametrize("written", ["{{ '\\ud800' }}", "{{ raise_exception('\\ud800') }}"])
async def test_a_template_that_writes_no_unicode_is_refused(
    tokenizer: ModelTokenizer, processes: TemplateProcesses, written: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"not Unicode|refused: \?"):
        await tokenizer.render(CHAT, domain="acme", template=written)


async def test_a_process_that_was_killed_is_replaced(
    tokenizer: ModelTokenizer, processes: TemplateProcesses
) -> None:
    for text in ("a", "b", "c"):
        rendered = await tokenizer.render(CHAT, domain="", template=text)
        assert rendered.rendered.text == text
        for child in psutil.Process().children():
            if "gateway.text.template_sandbox" in child.cmdline():
                child.kill()


async def test_a_long_conversation_is_rendered_beside_the_loop(
    tmp_path: Path, processes: TemplateProcesses
) -> None:
    template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    folder = changed(tmp_path, chat_template=template)
    tokenizer = ModelTokenizer(folder, LongTexts(), processes)
    content = "a" * (8 << 20)
    began = time.thread_time()
    rendered = await tokenizer.render(Conversation([Message("user", content)]), domain="acme")
    assert time.thread_time() - began < 0.05
    assert rendered.rendered.text == content.upper()


def test_names_count_as_what_a_template_may_render() -> None:
    assert Conversation([Message("user", "a", name="b" * 100)]).num_chars == 101


@pytest.mark.parametrize("path", FAMILIES, ids=[path.stem for path in FAMILIES])
async def test_a_process_renders_as_the_gateway_does(tokenizer: ModelTokenizer, path: Path) -> None:
    """Conversations with all that a template may read."""
    source = path.read_text()
    template = ChatTemplate(source, dict(tokenizer._special_tokens))
    for conversation in TURNS_OF_AGENTS.values():
        found = await tokenizer.render(conversation, domain="", template=source)
        assert found == RenderedChat(template.render(conversation), template.shows_tools)


@pytest.mark.parametrize("template", ["{% include 'x' %}", "{% extends 'x' %}"])
async def test_a_template_has_no_other_templates(tokenizer: ModelTokenizer, template: str) -> None:
    with pytest.raises(InvalidRequest, match="no loader"):
        await tokenizer.render(CHAT, domain="", template=template)
