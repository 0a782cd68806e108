"""Requests of great size: refused by name before anything is done for them, or done beside the
loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.catalog.catalog import Principal
from gateway.catalog.view import CatalogView
from gateway.dialects.completions import CompletionRequest, Completions
from gateway.dispatch.prompts import Prompt, encode_prompts
from gateway.exceptions import InvalidRequest
from gateway.http.request import MAX_BODY_BYTES, decode_request
from gateway.http.routes.tokens import MAX_TEXT_BYTES, MIN_COUNTED
from gateway.limits.bounds import MAX_DEPTH, MAX_REQUEST_TOKENS, check_nested
from gateway.text.long_texts import LongTexts
from gateway.text.template_process import TemplateProcesses
from gateway.text.tokenizer import ModelTokenizer
from store.records import ApiKey, ServedVersion, Tenant
from tests.doubles import make_tokenizer
from tests.gateway.scripts import say
from tests.gateway.service import THEN, Keys, Service, snapshot
from tests.scripted_worker import MAX_MODEL_LEN

CONTEXT = 16_000
NUM_PROMPTS = MAX_REQUEST_TOKENS // CONTEXT
INVOCATION = (*[7] * 63, 8)
CPU_S = 0.12
"""Of the loop's thread: three times what it takes to decode the bodies here, half of what it took
to work on them."""


def post(service: Service, path: str, body: Any) -> tuple[httpx.Response, float]:
    """The answer, and the CPU time of the loop's thread until it came."""
    before = service.call(time.thread_time)
    answer = service.post(path, body)
    return answer, service.call(time.thread_time) - before


def test_prompts_that_no_context_holds_are_not_worked_on(service: Service) -> None:
    num_requests = len(service.worker.requests)
    body = {"model": "tiny", "prompt": [[65] * CONTEXT] * 100, "echo": True}
    answer, cpu_s = post(service, "/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("request_too_large", "context_length_exceeded")
    assert cpu_s < CPU_S
    assert len(service.worker.requests) == num_requests


def test_more_tokens_than_a_context_are_not_detokenised(service: Service) -> None:
    """A body of 10 MB became a text of 136 MiB; this is the longest that is decoded."""
    answer, cpu_s = post(service, "/detokenize", {"model": "tiny", "tokens": [65] * 1_000_000})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens"
    assert len(answer.content) < 1024 and cpu_s < CPU_S


def test_a_text_of_more_tokens_is_not_tokenised(service: Service) -> None:
    """The tiny tokenizer has a token for each byte, and one of more characters."""
    for path, most in (("/tokenize", MIN_COUNTED), ("/v1/completions", MAX_MODEL_LEN)):
        answer, _ = post(service, path, {"model": "tiny", "prompt": "a" * (most + 1)})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert str(most) in error["message"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    return ModelTokenizer(folder, LongTexts(), TemplateProcesses())


@pytest.fixture(scope="module")
def view() -> CatalogView:
    """acme's `agent` is an activated LoRA."""
    version = ServedVersion(
        *("ten_acme", 1, THEN, "agent-1", "tiny"), name="agent", invocation_tokens=INVOCATION
    )
    known = snapshot(Keys().records, max_model_len=CONTEXT)
    return CatalogView(msgspec.structs.replace(known, versions=(version,), aliases=()))


async def prompts_of(
    tokenizer: ModelTokenizer, view: CatalogView, **fields: Any
) -> tuple[list[Prompt], float]:
    """Of a request to `agent@1`, and the CPU time of this thread until they were there."""
    tenant = Tenant(id="ten_acme", name="acme")
    key = ApiKey(id="k", tenant_id=tenant.id, hash=b"", scopes=frozenset())
    target = view.resolve(tenant, "agent@1")
    asked = Completions().read(CompletionRequest(model="agent@1", **fields))
    started = time.thread_time()
    found = await encode_prompts(tokenizer, target, asked, Principal(tenant, key.caller))
    return found, time.thread_time() - started


async def test_the_largest_request_is_worked_on_beside_the_loop(
    tokenizer: ModelTokenizer, view: CatalogView
) -> None:
    """Each prompt is decoded, and searched for an invocation that is nearly everywhere."""
    ids = [[7] * (CONTEXT - 1) for _ in range(NUM_PROMPTS)]
    found, cpu_s = await prompts_of(tokenizer, view, prompt=ids, echo=True, max_tokens=1)
    assert [len(prompt.echo) for prompt in found] == [CONTEXT - 1] * NUM_PROMPTS
    assert {prompt.activation for prompt in found} == {None}
    assert cpu_s < 0.05


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[7] * 8_000] * 128}, "prompt"),
        ({"prompt": [7] * 15_000, "n": 128, "max_tokens": 1}, "prompt"),
        ({"prompt": "a" * 15_000, "n": 128, "max_tokens": 1}, "prompt"),
    ],
)
async def test_prompts_and_choices_are_counted_together(
    tokenizer: ModelTokenizer, view: CatalogView, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest, match=str(MAX_REQUEST_TOKENS)) as refused:
        await prompts_of(tokenizer, view, **fields)
    assert (refused.value.param, refused.value.code) == (param, "request_too_large")


async def test_a_text_that_is_long_to_spell_is_refused(tokenizer: ModelTokenizer) -> None:
    most = [65] * MAX_TEXT_BYTES
    assert len(await tokenizer.decode(most, domain="", max_bytes=MAX_TEXT_BYTES)) == len(most)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TEXT_BYTES}"):
        await tokenizer.decode([*most, 65], domain="", max_bytes=MAX_TEXT_BYTES)


@pytest.mark.parametrize(
    ("field", "most", "value"),
    [
        ("logit_bias", 300, lambda n: {str(token): 1.0 for token in range(n)}),
        ("stop_token_ids", 64, lambda n: list(range(n))),
        ("stop", 64, lambda n: ["x"] * n),
        ("n", 128, lambda n: n),
        ("logprobs", 20, lambda n: n),
    ],
)
def test_what_makes_sampling_longer_is_bounded_by_name(
    service: Service, field: str, most: int, value: Callable[[int], Any]
) -> None:
    service.worker.script = say("y")
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    taken, _ = post(service, "/v1/completions", {**body, field: value(most)})
    refused, _ = post(service, "/v1/completions", {**body, field: value(most + 1)})
    assert taken.status_code == 200
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, field)
    assert str(most) in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        lambda: {"prompt": [7] * 2_000_000},
        lambda: {"prompt": [[1]] * 1_000_000},
        lambda: {"prompt": "a", "metadata": {str(number): "" for number in range(500_000)}},
        lambda: {"prompt": "a", "logit_bias": {str(number): 1 for number in range(500_000)}},
    ],
    ids=["ids", "lists", "metadata", "logit_bias"],
)
def test_a_body_of_millions_of_values_is_refused_before_it_is_decoded(
    fields: Callable[[], dict[str, Any]],
) -> None:
    body = msgspec.json.encode({"model": "tiny", **fields()})
    assert len(body) < MAX_BODY_BYTES
    begin = time.thread_time()
    with pytest.raises(InvalidRequest, match="commas") as refused:
        decode_request(msgspec.json.Decoder(CompletionRequest), body)
    assert time.thread_time() - begin < 0.05
    assert refused.value.code == "request_too_large"


def wrapped(value: Any, depth: int) -> Any:
    for number in range(depth):
        value = [value, 1] if number % 2 else {'"[{': value}
    return value


@given(st.text(st.sampled_from('"\\[]{}a/\u00e9')), st.integers(0, 3))
def test_depth_is_of_brackets_outside_strings(text: str, breadth: int) -> None:
    """However strings are escaped."""
    deepest = wrapped({text: text}, MAX_DEPTH - 2)
    written = check_nested([deepest, *[text] * breadth], 1 << 20, param="p")
    assert msgspec.json.decode(written) == [deepest, *[text] * breadth]
    for value in ([deepest], [text, deepest]):
        with pytest.raises(InvalidRequest, match="64"):
            check_nested([value], 1 << 20, param="p")
