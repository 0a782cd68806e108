"""From a caller's words to page keys: KV pages are shared by equal identity and by nothing else.

Names, salts, tenants and groups are spelled alike on purpose. Who may share with whom is worked out
from the drawn world itself, not from what the gateway makes of it.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from adapters.reference import AdapterRef
from gateway.catalog.catalog import Principal
from gateway.catalog.view import CatalogView
from gateway.dispatch.prompts import make_prompt
from gateway.dispatch.run import Run, Work, frame_of
from gateway.request import Request
from gateway.text.tokenizer import SamplingDefaults
from memory.page_key import PAGE_TOKENS
from store.records import Alias, ApiKey, BaseModel, CatalogSnapshot, ServedVersion, Tenant
from tests.adapters.files import BASE
from tools.source_tree import ROOT
from workers.scheduling.sequence import Sequence
from workers.wire.prefix_index import KEY_BYTES
from workers.wire.protocol import Generate, SamplingParams

NUM_REQUESTS = 100_000
THEN = datetime(2026, 1, 1, tzinfo=UTC)
WORDS = ["bot", "acme", "globex", "ten_acme", "tenant:ten_acme", "group:bot", "c0", "bot@1"]
TENANTS = [
    Tenant(id="ten_acme", name="acme"),
    Tenant(id="ten_globex", name="globex"),
    Tenant(id="acme", name="ten_acme", sharing_group="bot"),
    Tenant(id="bot", name="initech", sharing_group="bot"),
    Tenant(id="umbrella", name="umbrella", sharing_group="tenant:ten_acme"),
]
KEY = ApiKey(id="k", tenant_id=None, hash=b"", scopes=frozenset())
MODELS = [BaseModel(name, name, BASE, 4096, THEN) for name in ("tiny", "small")]
CONTENTS: dict[str, tuple[int, ...]] = {"c0": (), "c1": (), "c2": (1, 2), "c3": (2,), "acme": ()}
"""Content digest of an adapter -> its invocation."""


class Uploads:
    """Tenants upload under the same names again and again; each upload moves `prod`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._versions: dict[tuple[str, str, int], ServedVersion] = {}
        self._newest: dict[tuple[str, str], int] = {}

    def upload(self) -> None:
        tenant, name = self._rng.choice(TENANTS), self._rng.choice(WORDS[:3])
        number = self._newest.get((tenant.id, name), 0) + 1
        digest = self._rng.choice(list(CONTENTS))
        base = self._rng.choice(MODELS).name
        self._newest[tenant.id, name] = number
        self._versions[tenant.id, name, number] = ServedVersion(
            *(tenant.id, number, THEN, digest, base),
            name=name,
            invocation_tokens=CONTENTS[digest],
        )

    def view(self) -> CatalogView:
        return CatalogView(
            CatalogSnapshot(
                generation=1,
                tenants=tuple(TENANTS),
                keys=(),
                models=tuple(MODELS),
                versions=tuple(self._versions.values()),
                aliases=tuple(
                    Alias(tenant, name, "prod", number)
                    for (tenant, name), number in self._newest.items()
                ),
            )
        )

    def pick(self) -> tuple[Tenant, str, str, str | None]:
        """(who asks, model name, its base's digest, the adapter's content or None)."""
        if not self._newest or self._rng.random() < 0.3:
            model = self._rng.choice(MODELS)
            return self._rng.choice(TENANTS), model.name, model.digest, None
        tenant_id, name = self._rng.choice(list(self._newest))
        number = self._newest[tenant_id, name]
        asked = name
        if self._rng.random() < 0.3:
            number = self._rng.randint(1, number)
            asked = f"{name}@{number}"
        version = self._versions[tenant_id, name, number]
        tenant = next(tenant for tenant in TENANTS if tenant.id == tenant_id)
        return tenant, asked, version.base_name, version.digest


def page_keys(
    view: CatalogView, tenant: Tenant, model: str, salt: str | None, tokens: list[int]
) -> list[bytes]:
    """As a worker computes them from what the gateway sends."""
    sequence = Sequence(
        0,
        make_frame(view, tenant, model, salt, tokens),
        arrival_s=0.0,
        end_tokens=frozenset(),
        block_table=cast("Any", None),
        layout="layout",
    )
    return sequence.page_keys(len(tokens) // PAGE_TOKENS)


def make_frame(
    view: CatalogView, tenant: Tenant, model: str, salt: str | None, tokens: list[int]
) -> Generate:
    asked = Request(model=model, prompts=[[*tokens]], cache_salt=salt or "")
    target = view.resolve(tenant, model)
    prompts = [make_prompt(target, tokens)]
    tokenizer = cast("Any", SimpleNamespace(pooling=None, defaults=SamplingDefaults()))
    run = Run("r", Principal(tenant, KEY.caller), asked, target, tokenizer, prompts, 0.0, 0)
    return frame_of(run, prompts[0])


def acts_from(content: str | None, tokens: list[int]) -> int | None:
    if content is None:
        return None
    word = list(CONTENTS[content])
    starts = [i for i in range(len(tokens)) if tokens[i : i + len(word)] == word]
    return max(starts, default=None) if word else 0


def test_pages_are_shared_by_equal_identity_only() -> None:
    rng = random.Random(42)
    uploads = Uploads(rng)
    prompts = [[0] * rng.randrange(PAGE_TOKENS, 40) for _ in range(4)]
    prompts += [[*prompt[:k], 1, 2, *prompt[k:]] for prompt in prompts for k in (3, 15, 16)]
    prompts += [[*prompt, 0, 1, 2, 1, 2, 0] for prompt in prompts]
    # The page border cuts an invocation, or what would be one: the first page is the same.
    prompts += [[1, 2, *[0] * 13, 1, last, *[0] * 20] for last in (2, 0)]
    key_of: dict[tuple[object, ...], bytes] = {}
    identity_of: dict[bytes, tuple[object, ...]] = {}
    view = uploads.view()
    seen_contents: set[tuple[str, str, str | None]] = set()
    num_pages = 0
    for number in range(NUM_REQUESTS):
        if number % 500 == 0:
            uploads.upload()
            view = uploads.view()
        tenant, model, base, content = uploads.pick()
        salt = rng.choice([None, *WORDS])
        tokens = rng.choice(prompts)
        if "@" not in model:
            seen_contents.add((tenant.id, model, content))
        group = ("group", tenant.sharing_group) if tenant.sharing_group else ("tenant", tenant.id)
        start = acts_from(content, tokens)
        for index, key in enumerate(page_keys(view, tenant, model, salt, tokens)):
            end = (index + 1) * PAGE_TOKENS
            acting = None if start is None or end <= start else (content, start)
            identity = base, group, salt, acting, tuple(tokens[:end])
            assert key_of.setdefault(identity, key) == key
            assert identity_of.setdefault(key, identity) == identity
            num_pages += 1
    assert len(key_of) < 0.9 * num_pages, "equal identities hardly occurred"
    by_name = {(tenant, model) for tenant, model, _ in seen_contents}
    assert len(seen_contents) > 2 * len(by_name), "names hardly changed their contents"


def test_a_gateway_looks_for_the_keys_that_a_worker_has() -> None:
    rng = random.Random(7)
    uploads = Uploads(rng)
    for number in range(2000):
        if number % 50 == 0:
            uploads.upload()
        view = uploads.view()
        tenant, model, _, _ = uploads.pick()
        salt = rng.choice([None, *WORDS])
        tokens = [rng.choice([0, 1, 2]) for _ in range(rng.randrange(1, 70))]
        (prefix,) = Work.of([make_frame(view, tenant, model, salt, tokens)]).prompts
        theirs = page_keys(view, tenant, model, salt, tokens)
        assert list(prefix.keys("layout")) == [key[:KEY_BYTES] for key in theirs]


def test_frames_are_made_in_one_place_and_page_keys_are_derived_from_them_in_one() -> None:
    """A second derivation could forget a salt, and tenants would share pages."""
    calls = Counter(
        (node.func.id, package, path.name)
        for package in ("gateway", "workers")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
    assert [each for each in calls.elements() if each[:2] == ("Generate", "gateway")] == [
        ("Generate", "gateway", "run.py")
    ]
    assert [each for each in calls.elements() if each[0] == "PageHasher"] == [
        ("PageHasher", "workers", "protocol.py")
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "small"},
        {"cache_domain": "tenant:other"},
        {"cache_salt": "salt"},
        {"adapter": None},
        {"adapter": AdapterRef("c1")},
        {"activation": 3},
        {"tokens": [1] * 40},
    ],
    ids=lambda other: next(iter(other)),
)
def test_each_field_of_a_frame_that_identifies_pages_changes_their_keys(
    other: dict[str, Any],
) -> None:
    params = SamplingParams(1, 0)
    frame = Generate(0, "r", "tiny", [0] * 40, params, "tenant:a", AdapterRef("c0"))
    keys = [
        list(Work.of([each]).prompts[0].keys("layout"))
        for each in (frame, msgspec.structs.replace(frame, **other))
    ]
    assert len(keys[0]) == len(keys[1]) == 40 // PAGE_TOKENS
    assert not set(keys[0]) & set(keys[1])
