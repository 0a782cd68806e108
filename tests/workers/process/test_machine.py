"""What a worker makes of settings that leave something to the machine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from ops import variant_choice
from ops.build import BuildError
from ops.processor import REQUIRED, Processor
from workers.process.build import Worker
from workers.process.config import WorkerConfig
from workers.process.errors import CannotServe
from workers.process.machine import Card, settled

H100 = Card("NVIDIA H100", 80 << 30)
NO_CARD = "torch sees no CUDA device"


def config(**given: object) -> WorkerConfig:
    needed = {"models": {}, "store": "/none", "cache_dir": Path("/none"), "listen": ""}
    return WorkerConfig(**(needed | given))  # pyright: ignore


def find_nothing() -> str:
    raise AssertionError("the GPU is not to be asked for")


@pytest.mark.parametrize(
    "given", [{"device": "auto"}, {"device": "cuda"}, {"device": "auto", "ops": "cuda"}]
)
def test_a_card_is_used_with_most_of_its_free_memory(given: dict[str, object]) -> None:
    got = settled(config(**given), lambda: H100)
    assert (got.device, got.ops, got.max_batched_tokens) == ("cuda", "cuda", 2048)
    assert got.device_memory == 72 << 30


def test_sizes_that_are_given_are_kept() -> None:
    got = settled(config(device="auto", memory=5 << 30, max_batched_tokens=512), lambda: H100)
    assert (got.memory, got.device_memory, got.max_batched_tokens) == (5 << 30, None, 512)
    assert settled(config(device="cuda", device_memory=9), lambda: H100).device_memory == 9


def test_without_a_card_auto_computes_on_the_cpu_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        got = settled(config(device="auto"), lambda: NO_CARD)
    assert (got.device, got.ops, got.max_batched_tokens) == ("cpu", "cpu", 512)
    assert 0 < got.memory <= 1 << 30 and got.device_memory is None
    assert NO_CARD in caplog.text


def test_the_card_is_left_alone_where_the_cpu_is_meant() -> None:
    """Looking for one makes a context on it."""
    for given in ({"device": "cpu"}, {"device": "auto", "ops": "reference"}, {"ops": "cpu"}):
        assert settled(config(**given), find_nothing).device == "cpu"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": "cuda"}, f"^device: 'cuda' cannot be had: {NO_CARD}$"),
        ({"device": "auto", "ops": "cuda"}, f"^ops: 'cuda' cannot be had: {NO_CARD}$"),
        ({"device": "cpu", "ops": "cuda"}, "^ops: 'cuda' computes on a GPU, and device is 'cpu'$"),
        (
            {"device": "cuda", "ops": "cpu"},
            "^ops: 'cpu' computes on the CPU, and device is 'cuda'$",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(given: dict[str, object], words: str) -> None:
    with pytest.raises(CannotServe, match=words):
        settled(config(**given), lambda: NO_CARD)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_worker_on_this_machine_says_why_it_has_no_card() -> None:
    with pytest.raises(CannotServe, match=r"^device: 'cuda' cannot be had: torch .*CUDA"):
        Worker(config(device="cuda"), instance_id="", progress=lambda *_: None)


def test_kernels_are_the_processors_fastest_unless_a_variant_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor = Processor("GenuineIntel", REQUIRED["avx2"])
    monkeypatch.setattr(Processor, "here", lambda: processor)
    assert settled(config(device="cpu")).kernel_variant == "avx2"
    assert settled(config(device="cpu", kernel_variant="scalar")).kernel_variant == "scalar"
    with pytest.raises(
        CannotServe, match=r"^kernel_variant: 'avx512' .*can run avx2, scalar, tiles$"
    ):
        settled(config(device="cpu", kernel_variant="avx512"))


def test_kernels_that_fail_their_check_are_replaced_and_the_reason_is_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(variant: str) -> None:
        raise BuildError(f"{variant} cannot be used: no permission")

    processor = Processor("GenuineIntel", REQUIRED["amx"])
    monkeypatch.setattr(Processor, "here", lambda: processor)
    monkeypatch.setattr(variant_choice, "load", lambda _: None)
    got = settled(config(device="cpu"))
    assert (got.kernel_variant, got.kernel_fault, caplog.text) == ("amx", "", "")
    monkeypatch.setattr(variant_choice, "load", fail)
    for wanted in ("", "amx"):
        caplog.clear()
        got = settled(config(device="cpu", kernel_variant=wanted))
        assert got.effective()["kernel_variant"] == "avx512"
        assert got.effective()["kernel_fault"] == "amx cannot be used: no permission"
        assert len(caplog.records) == 1
        assert "of avx512 are used, because amx cannot" in caplog.text
