"""Tokens and templates are those of transformers on the same folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from gateway.exceptions import ContextLengthExceeded, InvalidRequest, TokenizerUnavailable
from gateway.request import Conversation, Message
from gateway.text.long_texts import LongTexts
from gateway.text.template_process import TemplateProcesses
from gateway.text.tokenizer import ModelTokenizer, Tokenizers
from tests.doubles import make_tokenizer
from tests.gateway.service import Service

TEXTS = [
    "",
    "Hello  world",
    "<|im_start|>user\n12 345<|im_end|>",
    "naïve 🏴 \u0000 漢",
    "a" * 20_000,
]
TEMPLATES = [
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}",
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.index < 3 %}\n    {{ m['content'] }}\n"
    "  {% endif %}\n{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}{{ eos_token }}",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools is none }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ strftime_now('%Y') }}{{ add_generation_prompt }}{{ unk_token }}",
]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": ' be <kind> & "short" '},
    {"role": "user", "content": "Grüße"},
    {"role": "assistant", "content": "ok"},
]
CONVERSATION = Conversation([Message(**message) for message in CHAT])


def changed(folder: Path, **config: Any) -> Path:
    """The tiny tokenizer with other entries in its tokenizer_config.json."""
    make_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def add_bos(path: Path) -> None:
    backend: Any = Tokenizer.from_file(str(path))
    backend.post_processor = TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 256)]
    )
    backend.save(str(path))


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}])
@pytest.mark.parametrize("adds_bos", [False, True])
async def test_ids_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], adds_bos: bool
) -> None:
    """tokenizer.json alone says which specials are added; the older entries do not count."""
    folder = changed(tmp_path, **config)
    if adds_bos:
        add_bos(folder / "tokenizer.json")
    oracle = AutoTokenizer.from_pretrained(folder)
    tokenizer = ModelTokenizer(folder, LongTexts(), TemplateProcesses())
    for has_specials in (True, False):
        assert await tokenizer.encode_many(TEXTS, domain="", add_special_tokens=has_specials) == [
            oracle.encode(text, add_special_tokens=has_specials) for text in TEXTS
        ]
    tokens, change, _ = await tokenizer.encode_chat(CONVERSATION, domain="")
    assert not change and tokens == oracle.apply_chat_template(
        CHAT, add_generation_prompt=True, tokenize=True, return_dict=False
    )


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("in_file", [True, False])
async def test_templates_render_as_in_transformers(
    tmp_path: Path, template: str, in_file: bool
) -> None:
    if in_file:
        folder = changed(tmp_path, chat_template="not this one")
        (folder / "chat_template.jinja").write_text(template)
    else:
        folder = changed(tmp_path, chat_template=template)
    oracle = AutoTokenizer.from_pretrained(folder)
    rendered = await ModelTokenizer(folder, LongTexts(), TemplateProcesses()).render(
        CONVERSATION, domain=""
    )
    assert rendered.rendered.text == oracle.apply_chat_template(
        CHAT, add_generation_prompt=True, tokenize=False
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content.format.__globals__.x }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ nothing.at.all }}",
    ],
)
async def test_what_a_template_may_not_do(tmp_path: Path, template: str) -> None:
    tokenizer = ModelTokenizer(
        changed(tmp_path, chat_template=template), LongTexts(), TemplateProcesses()
    )
    with pytest.raises(InvalidRequest) as refusal:
        await tokenizer.render(CONVERSATION, domain="")
    assert refusal.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{% break %}",
        "{% for a in [1] %}" * 22 + "x" + "{% endfor %}" * 22,
        "{{ " + "+".join(["1"] * 1500) + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{{ '\\N{no such character}' }}",
    ],
    ids=["a break outside of loops", "too many loops", "too deep", "digits", "escape"],
)
async def test_a_template_that_does_not_compile_is_refused(
    tmp_path: Path, processes: TemplateProcesses, template: str
) -> None:
    tokenizer = ModelTokenizer(changed(tmp_path, chat_template=None), LongTexts(), processes)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="not valid"):
            await tokenizer.render(CONVERSATION, domain="", template=template)


async def test_a_model_without_template_does_not_chat(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(
        changed(tmp_path, chat_template=None), LongTexts(), TemplateProcesses()
    )
    with pytest.raises(InvalidRequest, match="no chat template"):
        await tokenizer.render(CONVERSATION, domain="")


async def test_a_text_that_must_have_too_many_tokens_is_refused(tmp_path: Path) -> None:
    """The longest token is <|im_start|>; one of so many more characters is not read."""
    tokenizer = ModelTokenizer(changed(tmp_path), LongTexts(), TemplateProcesses())
    turns = "<|im_start|>" * 5
    (tokens,) = await tokenizer.encode_many([turns], domain="", max_tokens=5)
    assert len(tokens) == 5
    with pytest.raises(ContextLengthExceeded, match="61 characters"):
        await tokenizer.encode_many(["Hi", turns + "a"], domain="", max_tokens=5)
    with pytest.raises(ContextLengthExceeded):
        await tokenizer.encode_chat(
            Conversation([Message("user", "a" * 61)]), domain="", max_tokens=5
        )


def test_sampling_defaults_of_the_model(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [257], "do_sample": True})
    )
    defaults = ModelTokenizer(folder, LongTexts(), TemplateProcesses()).defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 20, None)


async def test_a_tokenizer_is_loaded_once(store: Path) -> None:
    tokenizers = Tokenizers(store.joinpath)
    assert await tokenizers.get("d" * 64) is await tokenizers.get("d" * 64)


@pytest.mark.parametrize("content", [None, "{ not json", '{"model": {"type": "Unheard"}}'])
async def test_a_tokenizer_that_fails_is_loaded_again_after_a_while(
    tmp_path: Path, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.text.tokenizer.RETRY_S", 0.02)
    (tmp_path / "late").mkdir()
    if content is not None:
        (tmp_path / "late" / "tokenizer.json").write_text(content)
    searches: list[str] = []

    def find(digest: str) -> Path:
        searches.append(digest)
        return tmp_path / digest

    tokenizers = Tokenizers(find)
    for _ in range(5):
        with pytest.raises(TokenizerUnavailable):
            await tokenizers.get("late")
    assert len(searches) == 1
    make_tokenizer(tmp_path / "late")
    await asyncio.sleep(0.05)
    assert await (await tokenizers.get("late")).encode_many(["x"], domain="")


async def test_tokenizers_used_least_recently_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.text.tokenizer.MAX_TOKENIZERS", 2)
    for name in "abc":
        (tmp_path / name).mkdir()
        make_tokenizer(tmp_path / name)
    tokenizers = Tokenizers(tmp_path.joinpath)
    kept, dropped = await tokenizers.get("a"), await tokenizers.get("b")
    assert await tokenizers.get("a") is kept
    await tokenizers.get("c")
    assert await tokenizers.get("a") is kept
    assert await tokenizers.get("b") is not dropped


def test_tokenize_and_back(service: Service) -> None:
    def post(route: str, **body: Any) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {service.keys.acme}"}
        answer = httpx.post(service.url + route, headers=headers, json={"model": "tiny", **body})
        return answer.json()

    text = "<|im_start|>Grüße"
    tokenized = post("/tokenize", prompt=text)
    assert tokenized["count"] == len(tokenized["tokens"]) == 1 + len("Grüße".encode())
    assert tokenized["max_model_len"] == 128
    assert post("/detokenize", tokens=tokenized["tokens"]) == {"prompt": text}
    chat = post("/tokenize", messages=[{"role": "user", "content": "Hi"}])
    assert post("/detokenize", tokens=chat["tokens"])["prompt"] == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert post("/tokenize")["error"]["param"] == "prompt"
    assert post("/detokenize", tokens=[320])["error"]["param"] == "tokens"
