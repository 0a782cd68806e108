"""Log-likelihoods of continuations as lm-eval asks for them, against transformers + peft.

A harness sends a text with its continuation, asks for one token more, and takes off the score of
the last token. So a generated token without a score would shift all of them: the questions here are
such that the model ends its answer there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoTokenizer

from tests.doubles import make_adapter
from tests.e2e.tiny import NAME, Tiny
from tests.oracle import Oracle
from tests.stack import Stack

pytestmark = pytest.mark.full

ADAPTER = "chat"
LETTERS = "abcdefghijklmnopqrstuvwxyz.,?"
NUM_TEXTS, TEXT_CHARS = 12, 400
MAX_CONTINUATION = 12
VOCAB = 260
"""As many as the tokenizer has: lm-eval cuts a model with an adapter to them."""
END_TOKENS = list(range(256, VOCAB))
"""So many that a random model often ends its answer."""
NUM_QUESTIONS = 40
"""Of each model."""


class Question(NamedTuple):
    """A text and its continuation, and what transformers + peft makes of it."""

    context: str
    continuation: str
    log_likelihood: float
    is_greedy: bool


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Its output matrix is its own: with the input's it would repeat the last token."""
    folder = tmp_path_factory.mktemp("tiny")
    return Tiny(folder, tie_word_embeddings=False, vocab_size=VOCAB, eos_token_id=END_TOKENS)


@pytest.fixture(scope="module")
def adapter(tiny: Tiny) -> Path:
    return make_adapter(tiny.model, tiny.folder / ADAPTER, seed=0, b_std=0.5)


@pytest.fixture(scope="module")
def key(stack: Stack, adapter: Path) -> str:
    key = stack.create_tenant("acme")
    stack.push(adapter, ADAPTER, "acme")
    return key


@pytest.fixture(scope="module")
def questions(tiny: Tiny, adapter: Path) -> dict[str, list[Question]]:
    """By the model that is asked."""
    oracle = Oracle(tiny.model, {ADAPTER: adapter})
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny.model)
    found = {
        name: list(questions_about(oracle, tokenizer, name if name == ADAPTER else None))
        for name in (NAME, ADAPTER)
    }
    return {name: each[:NUM_QUESTIONS] for name, each in found.items()}


def questions_about(oracle: Oracle, tokenizer: Any, adapter: str | None) -> Iterator[Question]:
    """Continuations after which the model would end its answer, and ones that it would write."""
    rng = random.Random(1)
    for _ in range(NUM_TEXTS):
        text = "".join(rng.choices(LETTERS, k=TEXT_CHARS))
        tokens = tokenizer(text).input_ids
        assert len(tokens) == len(text), "a token a character"
        best = oracle.logits(tokens, adapter).argmax(-1).tolist()
        for at in range(MAX_CONTINUATION, TEXT_CHARS):
            said = tokenizer.decode([best[at]])
            if best[at] in END_TOKENS:
                start = at + 1 - rng.randrange(1, MAX_CONTINUATION)
                yield ask(oracle, tokenizer, adapter, text[:start], text[start : at + 1])
            elif said and said in LETTERS and rng.random() < 0.05:
                yield ask(oracle, tokenizer, adapter, text[: at + 1], said)


def ask(
    oracle: Oracle, tokenizer: Any, adapter: str | None, context: str, continuation: str
) -> Question:
    tokens, start = tokenizer(context + continuation).input_ids, len(context)
    scores = oracle.logits(tokens, adapter).log_softmax(-1)[start - 1 : -1]
    wanted = torch.tensor(tokens[start:])
    chosen = scores.gather(1, wanted[:, None]).sum().item()
    return Question(context, continuation, chosen, bool((scores.argmax(-1) == wanted).all()))


def test_scores_of_continuations_equal_peft(
    stack: Stack, key: str, tiny: Tiny, questions: dict[str, list[Question]]
) -> None:
    """With the request and the arithmetic of lm-eval's `local-completions`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny.model)
    num_ended = 0
    with stack.openai(key, timeout=60) as client:
        for model, asked in questions.items():
            assert len(asked) == NUM_QUESTIONS and any(each.is_greedy for each in asked)
            prompts = [tokenizer(each.context + each.continuation).input_ids for each in asked]
            answer = client.completions.create(
                model=model,
                prompt=prompts,
                max_tokens=1,
                logprobs=1,
                echo=True,
                temperature=0,
                seed=1234,
            )
            for choice, question in zip(answer.choices, asked, strict=True):
                num_ended += choice.finish_reason == "stop"
                told, places = choice.logprobs, slice(len(question.context), -1)
                assert told and told.token_logprobs and told.top_logprobs
                scores, tops = told.token_logprobs[places], told.top_logprobs[places]
                assert sum(scores) == pytest.approx(question.log_likelihood, abs=1e-3)
                is_greedy = all(
                    score == max(top.values()) for score, top in zip(scores, tops, strict=True)
                )
                assert is_greedy == question.is_greedy
    assert num_ended >= NUM_QUESTIONS


def test_scores_of_labels_and_of_all_tokens_equal_peft(
    stack: Stack, key: str, tiny: Tiny, adapter: Path
) -> None:
    """Of the first token of a chat, base and adapter in one batch."""
    oracle = Oracle(tiny.model, {ADAPTER: adapter})
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny.model)
    messages: Any = [{"role": "user", "content": "good or bad?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    labels = [70, 3, 201]

    def told(model: str, **fields: Any) -> list[tuple[int, float]]:
        with stack.openai(key, timeout=60) as client:
            answer = client.chat.completions.create(
                model=model,
                messages=messages,
                max_tokens=1,
                temperature=0,
                logprobs=True,
                extra_body={"return_tokens_as_token_ids": True, **fields},
            )
        scores = answer.choices[0].logprobs
        assert scores and scores.content
        tops = scores.content[0].top_logprobs
        return [(int(top.token.removeprefix("token_id:")), top.logprob) for top in tops]

    asked = [
        (model, fields)
        for model in (NAME, ADAPTER)
        for fields in ({"logprob_token_ids": labels}, {"top_logprobs": -1})
    ]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda each: told(each[0], **each[1]), asked))
    for (model, fields), scores in zip(asked, answers, strict=True):
        logits = oracle.logits(prompt, model if model == ADAPTER else None, last=1)[0]
        wanted = logits.log_softmax(-1).tolist()
        ranked = sorted(range(VOCAB), key=lambda token: -wanted[token])
        # The token that was drawn is greedy's: the likeliest.
        assert [token for token, _ in scores] == (
            [ranked[0], *labels] if "logprob_token_ids" in fields else ranked
        )
        assert [each for _, each in scores] == pytest.approx(
            [wanted[token] for token, _ in scores], abs=1e-4
        )


@pytest.mark.parametrize("model", [NAME, ADAPTER])
def test_lm_eval_finds_what_it_finds_with_transformers(
    stack: Stack,
    key: str,
    tiny: Tiny,
    adapter: Path,
    questions: dict[str, list[Question]],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
) -> None:
    """Its `local-completions` against its `hf`, with peft for the adapter."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.api.instance import Instance  # pyright: ignore
    from lm_eval.models.huggingface import HFLM  # pyright: ignore
    from lm_eval.models.openai_completions import LocalCompletionsAPI  # pyright: ignore

    monkeypatch.setenv("OPENAI_API_KEY", key)
    peft = {"peft": str(adapter)} if model == ADAPTER else {}
    # Its cache takes continuations of one token for longer ones behind the same text.
    local: Any = HFLM(
        pretrained=str(tiny.model),
        device="cpu",
        dtype="float32",
        batch_size=8,
        logits_cache=False,
        **peft,
    )
    served: Any = LocalCompletionsAPI(
        base_url=f"{stack.url}/v1/completions",
        model=model,
        tokenizer=str(tiny.model),
        tokenizer_backend="huggingface",
        max_length=2048,
        batch_size=8,
    )
    asked = [
        Instance("loglikelihood", {}, (each.context, each.continuation), number)
        for number, each in enumerate(questions[model])
    ]
    expected, found = local.loglikelihood(asked), served.loglikelihood(asked)
    assert [score for score, _ in found] == pytest.approx([s for s, _ in expected], abs=1e-3)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert [score for score, _ in expected] == pytest.approx(
        [each.log_likelihood for each in questions[model]], abs=1e-3
    )
