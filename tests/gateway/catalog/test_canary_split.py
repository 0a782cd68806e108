"""Canary sets: by weight, sticky, and growing without taking anybody's version away."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.catalog.resolved_model import pick_version
from gateway.catalog.view import CatalogView
from store.records import Alias, Tenant
from tests.gateway.service import snapshot

ACME = Tenant(id="ten_acme", name="acme")

weights = st.integers(1, 1_000_000)
sets = st.dictionaries(st.integers(1, 999), weights, min_size=2, max_size=6)
subjects = st.lists(st.text(max_size=20), min_size=1, max_size=40)


def alias(canary: dict[int, int], stable: int | None = None) -> Alias:
    return Alias("t", "bot", "prod", min(canary) if stable is None else stable, canary)


@given(sets, subjects)
def test_a_caller_keeps_its_version(canary: dict[int, int], callers: list[str]) -> None:
    """Also in another process: nothing but the arguments matters, nor the order of the weights."""
    turned = dict(reversed(canary.items()))
    for caller in callers:
        picked = pick_version(alias(canary), caller)
        assert picked in canary
        assert pick_version(alias(turned), caller) == picked


@given(sets, st.data(), subjects, weights)
def test_a_version_with_more_weight_keeps_its_callers(
    canary: dict[int, int], data: st.DataObject, callers: list[str], more: int
) -> None:
    raised = data.draw(st.sampled_from(sorted(set(canary) - {min(canary)})))
    grown = alias({**canary, raised: canary[raised] + more})
    for caller in callers:
        if pick_version(alias(canary), caller) == raised:
            assert pick_version(grown, caller) == raised


@given(st.integers(1, 98), st.integers(1, 98), subjects)
def test_it_may_take_from_the_stable_one(one: int, two: int, callers: list[str]) -> None:
    """10 of 100, then 25 of 100, then all: each step keeps those of the step before."""
    low, high = sorted((one, two))
    steps = [alias({7: 100 - low, 8: low}), alias({7: 100 - high, 8: high}), alias({8: 1}, 8)]
    for caller in callers:
        picked = [pick_version(step, caller) for step in steps]
        assert picked == sorted(picked)


def test_by_weight() -> None:
    canary = {3: 70, 7: 10, 9: 20}
    counts = dict.fromkeys(canary, 0)
    for i in range(20_000):
        counts[pick_version(alias(canary, stable=3), f"user-{i}")] += 1
    # Six standard deviations.
    for version, weight in canary.items():
        expected = 20_000 * weight / 100
        assert abs(counts[version] - expected) < 6 * (expected * (1 - weight / 100)) ** 0.5


def test_the_next_canary_is_tried_by_others() -> None:
    """By the newest version: the first tenth is not everybody's test audience for ever."""

    def audience(newest: int) -> set[int]:
        canary = alias({3: 90, newest: 10})
        return {i for i in range(5_000) if pick_version(canary, f"user-{i}") == newest}

    assert len(audience(4) & audience(5)) < len(audience(4)) / 2


def test_one_version_is_not_split() -> None:
    assert pick_version(Alias("t", "bot", "prod", 7), "anybody") == 7


def with_canary(canary: dict[int, int]) -> CatalogView:
    plain = snapshot([])
    aliases = tuple(
        msgspec.structs.replace(a, canary=canary)
        if (a.tenant_id, a.alias) == ("ten_acme", "prod")
        else a
        for a in plain.aliases
    )
    return CatalogView(msgspec.structs.replace(plain, aliases=aliases))


def test_resolve_by_subject() -> None:
    view = with_canary({7: 1, 3: 1})
    picked: dict[str, int] = {}
    for i in range(100):
        target = view.resolve(ACME, "support-bot", f"user-{i}")
        assert target.version and target.canary
        adapter = target.adapter_for("")
        assert adapter and adapter.name == f"support-bot@{target.version.version}"
        picked[f"user-{i}"] = target.version.version
    assert set(picked.values()) == {3, 7}
    for subject, version in picked.items():
        assert view.resolve(ACME, "acme/support-bot@prod", subject).version.version == version  # type: ignore[union-attr]


def test_a_target_that_is_not_ready_falls_back_to_the_stable_one() -> None:
    view = with_canary({7: 1, 8: 1_000_000})
    for i in range(50):
        assert view.resolve(ACME, "support-bot", f"user-{i}").version.version == 7  # type: ignore[union-attr]


def test_the_card_describes_the_stable_version_and_lists_the_split() -> None:
    view = with_canary({7: 90, 3: 10})
    assert {"support-bot", "support-bot@staging"} <= set(view.names(ACME))
    card = view.card(ACME, "support-bot")
    assert card.root == "support-bot@7"
    assert card.adapter and (card.adapter.version, card.adapter.canary) == (7, {7: 90, 3: 10})
    staging = view.card(ACME, "support-bot@staging")
    assert staging.adapter and staging.adapter.canary is None
