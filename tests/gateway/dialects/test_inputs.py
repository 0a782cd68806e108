"""What becomes a vector or a score: how long it may be, and whose special tokens are around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.gateway.dialects.test_relevance_scores import longest_is_best
from tests.gateway.scripts import embed, say, spelled
from tests.gateway.service import Service, make_store, snapshot
from tests.scripted_worker import DIGEST, LAYOUT
from workers.wire.protocol import ModelInfo

LENGTH = 1024
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
RENDERED = "<|im_start|>user\nHi<|im_end|>\n"
BOS = "<|bos|>"
EOS = "<|pad|>"
DOCUMENTS = ["a", "bbbb", "ccccdde"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Its tokenizer puts a special token before each text and one behind it."""
    store: Path = make_store(tmp_path_factory.mktemp("inputs"))
    path = str(store / DIGEST / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(
        f"{BOS} $A {EOS}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)],
    )
    tokenizer.save(path)
    service = Service(store)
    service.worker.models = [ModelInfo(DIGEST, "tiny", LENGTH, LAYOUT)]
    service.start()
    longer = snapshot(service.keys.records, generation=2, max_model_len=LENGTH)
    service.feed(longer)
    yield service
    service.stop()


def post(service: Service, path: str, **body: Any) -> httpx.Response:
    body = {"model": "tiny", **body}
    return service.post(path, body)


def sent(service: Service, path: str, **body: Any) -> list[str]:
    """Texts of the prompts that a request becomes."""
    before = len(service.worker.requests)
    answer = post(service, path, **body)
    assert answer.status_code == 200, answer.text
    return [spelled(request.tokens) for request in service.worker.requests[before:]]


def test_embeddings_of_a_conversation(service: Service, client: openai.OpenAI) -> None:
    service.worker.script = embed
    extra: dict[str, Any] = {"messages": CHAT}
    answer = client.post(
        "/embeddings", body={"model": "tiny", **extra}, cast_to=openai.types.CreateEmbeddingResponse
    )
    assert len(answer.data) == 1 and answer.usage.prompt_tokens == len(
        service.worker.requests[-1].tokens
    )
    assert spelled(service.worker.requests[-1].tokens) == RENDERED
    begun = sent(service, "/v1/embeddings", messages=CHAT, add_generation_prompt=True)
    assert begun == [RENDERED + "<|im_start|>assistant\n"]
    assert sent(service, "/v1/embeddings", messages=CHAT, add_special_tokens=True) == [
        BOS + RENDERED + EOS
    ]
    for wrong in ({"messages": CHAT, "input": "x"}, {}):
        refused = post(service, "/v1/embeddings", **wrong).json()["error"]
        assert "either 'input' or 'messages'" in refused["message"]


def test_texts_are_cut_at_their_end_and_keep_their_special_tokens(service: Service) -> None:
    """As vLLM cuts what becomes a vector."""
    service.worker.script = embed
    texts = ["Hello", "x" * (LENGTH + 9)]
    path = "/v1/embeddings"
    cut = sent(service, path, input=texts, truncate_prompt_tokens=4)
    assert cut == [f"{BOS}He{EOS}", f"{BOS}xx{EOS}"]
    left = sent(service, path, input=texts, truncate_prompt_tokens=4, truncation_side="left")
    assert left == [f"{BOS}lo{EOS}", f"{BOS}xx{EOS}"]
    bare = sent(service, path, input="Hello", truncate_prompt_tokens=4, add_special_tokens=False)
    assert bare == ["Hell"]
    ids = sent(service, path, input=[[1, 2, 3, 4, 5]], truncate_prompt_tokens=4)
    assert len(service.worker.requests[-1].tokens) == 4 and len(ids) == 1
    whole, cut = sent(service, path, input=texts, truncate_prompt_tokens=-1)
    assert (whole, cut) == (f"{BOS}Hello{EOS}", f"{BOS}{'x' * (LENGTH - 2)}{EOS}")
    assert post(service, path, input=texts).status_code == 400
    assert sent(service, path, input="Hi", add_special_tokens=False) == ["Hi"]
    for too_few in (0, 2):
        refused = post(service, path, input="Hi", truncate_prompt_tokens=too_few).json()["error"]
        assert refused["param"] == "truncate_prompt_tokens"


def test_a_completion_keeps_its_last_tokens_and_its_special_ones(service: Service) -> None:
    service.worker.script = say("ok")
    path = "/v1/completions"
    for side, kept in ((None, "lo"), ("left", "lo"), ("right", "He")):
        asked: dict[str, Any] = {"truncate_prompt_tokens": 4, "truncation_side": side}
        assert sent(service, path, prompt="Hello", **asked) == [f"{BOS}{kept}{EOS}"]


def documents_in(prompts: list[str]) -> list[str]:
    return [each.split("<Document>: ")[1].split("<|im_end|>")[0] for each in prompts]


@pytest.mark.parametrize("names", ["queries documents", "queries items", "data_1 data_2"])
def test_scores_by_the_names_of_vllm(service: Service, names: str) -> None:
    service.worker.script = longest_is_best
    first, second = names.split()
    by_name = post(service, "/score", **{first: "q", second: DOCUMENTS}).json()
    by_text = post(service, "/score", text_1="q", text_2=DOCUMENTS).json()
    assert by_name["data"] == by_text["data"] and by_name["usage"] == by_text["usage"]
    for wrong in (
        {first: "q"},
        {first: "q", "text_2": "d"},
        {first: "q", second: "d", "text_1": "q"},
    ):
        error = post(service, "/score", **wrong).json()["error"]
        assert "Give one of 'queries' with 'documents'" in error["message"]


@pytest.mark.parametrize("path", ["/v1/score", "/v2/rerank"])
def test_documents_are_cut_and_questions_are_not(service: Service, path: str) -> None:
    """The query and the template stay whole."""
    service.worker.script = longest_is_best
    field = "queries" if path == "/v1/score" else "query"
    asked: dict[str, Any] = {field: "q", "documents": DOCUMENTS}
    whole = sent(service, path, **asked)
    assert documents_in(whole) == DOCUMENTS
    most = len(service.worker.requests[-2].tokens)
    cut = sent(service, path, **asked, truncate_prompt_tokens=most)
    assert documents_in(cut) == ["a", "bbbb", "cccc"]
    left = sent(service, path, **asked, truncate_prompt_tokens=most, truncation_side="left")
    assert documents_in(left) == ["a", "bbbb", "cdde"]
    assert [len(each.tokens) for each in service.worker.requests[-2:]] == [most, most]
    long = asked | {"documents": ["d" * LENGTH]}
    assert post(service, path, **long).status_code == 400
    sent(service, path, **long, truncate_prompt_tokens=-1)
    assert len(service.worker.requests[-1].tokens) == LENGTH
    refused = post(service, path, **asked, truncate_prompt_tokens=5).json()["error"]
    assert refused["param"] == "truncate_prompt_tokens"
    assert sent(service, path, **asked, add_special_tokens=True)[0] == BOS + whole[0] + EOS


def test_a_document_keeps_its_first_tokens(service: Service) -> None:
    service.worker.script = longest_is_best
    asked: dict[str, Any] = {"query": "q", "documents": [*DOCUMENTS, "ab🏴"]}
    cut = sent(service, "/v2/rerank", **asked, max_tokens_per_doc=4)
    assert documents_in(cut) == ["a", "bbbb", "cccc", "ab"]


def test_counted_messages_with_the_tokenizer_s_own_tokens(service: Service) -> None:
    for asked, begin, end in ((None, "", ""), (False, "", ""), (True, BOS, EOS)):
        counted = post(service, "/tokenize", messages=CHAT, add_special_tokens=asked).json()
        assert spelled(counted["tokens"]) == f"{begin}{RENDERED}<|im_start|>assistant\n{end}"
