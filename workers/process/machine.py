"""Settings that depend on the worker's machine, for example on whether the machine has a GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import msgspec
import torch

from ops.processor import Processor
from ops.variant_choice import VariantChoice, choose_variant
from workers.process.config import WorkerConfig
from workers.process.errors import CannotServe

log = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability (Ampere). Older GPUs cannot multiply bfloat16 matrices."""
FREE_PERCENT = 90
"""Percentage of a GPU's free memory for weights, KV and adapters. The rest is for activations,
captured graphs and cuBLAS."""
CPU_TOKENS, GPU_TOKENS = 512, 2048
"""Default of `max_batched_tokens` on a CPU and on a GPU. With fewer than 2,048 tokens in a step, a
GPU's matrix units would be idle for part of a prefill."""


class Card(NamedTuple):
    """GPU that the `cuda` backend can use. free_bytes: memory not used by any process."""

    name: str
    free_bytes: int


def find_card() -> Card | str:
    """Returns the current GPU, or the reason why no GPU can be used. Creates a CUDA context on the
    GPU."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device: no driver, or CUDA_VISIBLE_DEVICES hides it"
    name = torch.cuda.get_device_name()
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (MIN_CAPABILITY, capability))
        return f"{name} has compute capability {found}, at least {needed} is needed"
    if find_spec("triton") is None:
        return "Triton, which compiles the kernels, is not installed"
    return Card(name, torch.cuda.mem_get_info()[0])


def settled(config: WorkerConfig, find: Callable[[], Card | str] = find_card) -> WorkerConfig:
    """Returns the configuration with the unset settings filled in for this machine. find: function
    that finds the GPU. It is called only if the configuration permits a GPU.

    Raises CannotServe with the reason if a GPU is requested and none can be used.
    """
    if config.device == "cpu" and config.ops == "cuda":
        raise CannotServe("ops: 'cuda' computes on a GPU, and device is 'cpu'")
    if config.device == "cuda" and config.ops not in ("", "cuda"):
        raise CannotServe(f"ops: {config.ops!r} computes on the CPU, and device is 'cuda'")
    if config.device == "cpu" or config.ops in ("cpu", "reference"):
        return _on_cpu(config, Processor.here())
    card = find()
    if isinstance(card, Card):
        return _on_gpu(config, card)
    if config.device == "cuda" or config.ops == "cuda":
        setting = "device" if config.device == "cuda" else "ops"
        raise CannotServe(f"{setting}: 'cuda' cannot be had: {card}")
    log.info("computing on the CPU: %s", card)
    return _on_cpu(config, Processor.here())


def _on_cpu(config: WorkerConfig, processor: Processor) -> WorkerConfig:
    variant, runnable = config.kernel_variant, processor.variants()
    if variant and variant not in runnable:
        raise CannotServe(
            f"kernel_variant: {variant!r} needs instructions that this processor does not have; "
            f"it can run {', '.join(runnable)}"
        )
    backend = config.ops or "cpu"
    is_native = backend == "cpu"
    choice = choose_variant(variant, processor) if is_native else VariantChoice("")
    return msgspec.structs.replace(
        config,
        device="cpu",
        ops=backend,
        kernel_variant=choice.variant,
        kernel_fault=choice.fault,
        memory=config.memory or _default_memory(),
        max_batched_tokens=config.max_batched_tokens or CPU_TOKENS,
    )


def _on_gpu(config: WorkerConfig, card: Card) -> WorkerConfig:
    device_memory = config.device_memory
    if device_memory is None and not config.memory:
        device_memory = card.free_bytes * FREE_PERCENT // 100
    return msgspec.structs.replace(
        config,
        device="cuda",
        ops="cuda",
        device_memory=device_memory,
        max_batched_tokens=config.max_batched_tokens or GPU_TOKENS,
    )


def _default_memory() -> int:
    """Returns the default of `memory`: 1 GiB, or a quarter of the RAM if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(1 << 30, total // 4)
