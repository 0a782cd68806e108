"""The tests marked `gpu` on a machine that has torch, Triton, numpy, msgspec and pytest, and
neither the other packages of the suite nor pytest's plugins.

What those tests need of Hypothesis, safetensors, OpenTelemetry and llguidance is small, and stands
in here: examples are drawn at random from a fixed seed, nothing is measured, and there is no
structured output. Other tests are not collected there.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def _is_missing(package: str) -> bool:
    try:
        import_module(package)
    except ModuleNotFoundError:
        return True
    return False


IS_BARE = _is_missing("hypothesis")
PACKAGES = ("hypothesis", "safetensors", "opentelemetry", "llguidance")
COLLECTED = (
    *("ops/test_attention.py", "ops/test_cuda.py", "ops/test_linear.py", "ops/test_lora.py"),
    *("ops/test_pointwise.py", "ops/test_sampling.py", "workers/process/test_gpu_worker.py"),
)
"""Test files whose imports are met there, below `tests`."""
INI_OPTIONS = ("asyncio_mode", "asyncio_default_fixture_loop_scope", "timeout")
MARKERS = ("timeout(seconds): without the plugin it bounds nothing",)
MAX_EXAMPLES = 10

Draw = Callable[[random.Random], Any]
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def install() -> None:
    """Puts the stand-ins where the packages are not."""
    makers = {
        "hypothesis": _hypothesis,
        "safetensors": _safetensors,
        "opentelemetry": _opentelemetry,
        "llguidance": _llguidance,
    }
    for package in PACKAGES:
        if _is_missing(package):
            for name, contents in makers[package]().items():
                module = ModuleType(name)
                vars(module).update(contents)
                sys.modules[name] = module
                above, _, last = name.rpartition(".")
                if above:
                    setattr(sys.modules[above], last, module)


class Strategy:
    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def map(self, change: Callable[[Any], Any]) -> Strategy:
        return Strategy(lambda rng: change(self.draw(rng)))


class Data:
    """What `data()` gives: draws inside of a test."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def draw(self, strategy: Strategy, label: str | None = None) -> Any:
        return strategy.draw(self._rng)


def _hypothesis() -> dict[str, dict[str, Any]]:
    def lists(of: Strategy, *, min_size: int = 0, max_size: int = 8) -> Strategy:
        return Strategy(lambda rng: [of.draw(rng) for _ in range(rng.randint(min_size, max_size))])

    def composite(make: Callable[..., Any]) -> Callable[..., Strategy]:
        return lambda *arguments: Strategy(lambda rng: make(lambda of: of.draw(rng), *arguments))

    def given(**strategies: Strategy) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def decorate(test: Callable[..., None]) -> Callable[..., None]:
            import inspect

            def run(**fixtures: Any) -> None:
                rng = random.Random(0)
                for _ in range(MAX_EXAMPLES):
                    drawn = {name: each.draw(rng) for name, each in strategies.items()}
                    test(**fixtures, **drawn)

            signature = inspect.signature(test)
            kept = [p for p in signature.parameters.values() if p.name not in strategies]
            run.__name__, run.__doc__ = test.__name__, test.__doc__
            run.__signature__ = signature.replace(parameters=kept)  # pyright: ignore
            run.pytestmark = getattr(test, "pytestmark", [])  # pyright: ignore
            return run

        return decorate

    def settings(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda test: test

    strategies = {
        "DrawFn": object,
        "DataObject": Data,
        "composite": composite,
        "lists": lists,
        "integers": lambda low, high: Strategy(lambda rng: rng.randint(low, high)),
        "booleans": lambda: Strategy(lambda rng: rng.random() < 0.5),
        "sampled_from": lambda values: Strategy(lambda rng: rng.choice(list(values))),
        "one_of": lambda *some: Strategy(lambda rng: rng.choice(some).draw(rng)),
        "data": lambda: Strategy(Data),
    }
    return {
        "hypothesis": {"given": given, "settings": settings},
        "hypothesis.strategies": strategies,
    }


class SafeFile:
    """A safetensors file, read as the package's `safe_open` does."""

    def __init__(self, path: Path, framework: str = "pt") -> None:
        self._content = bytearray(Path(path).read_bytes())
        size = int.from_bytes(self._content[:8], "little")
        self._entries: dict[str, Any] = json.loads(self._content[8 : 8 + size])
        self._entries.pop("__metadata__", None)
        self._start = 8 + size

    def __enter__(self) -> SafeFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> Iterator[str]:
        return iter(self._entries)

    def get_tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        begin, end = (self._start + offset for offset in entry["data_offsets"])
        flat = torch.frombuffer(self._content[begin:end], dtype=DTYPES[entry["dtype"]])
        return flat.view(entry["shape"])

    def get_slice(self, name: str) -> Any:
        entry = self._entries[name]
        return SimpleNamespace(get_shape=lambda: entry["shape"], get_dtype=lambda: entry["dtype"])


def _save_file(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata or {}}
    payload = b""
    for name, tensor in tensors.items():
        content = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(payload), len(payload) + len(content)],
        }
        payload += content
    encoded = json.dumps(header).encode()
    Path(path).write_bytes(len(encoded).to_bytes(8, "little") + encoded + payload)


def _safetensors() -> dict[str, dict[str, Any]]:
    error = type("SafetensorError", (Exception,), {})
    return {
        "safetensors": {"safe_open": SafeFile, "SafetensorError": error},
        "safetensors.torch": {"save_file": _save_file},
    }


class Silent:
    """Takes any call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Silent()


def _opentelemetry() -> dict[str, dict[str, Any]]:
    metrics = {
        "get_meter": lambda *_: Silent(),
        **dict.fromkeys(("Meter", "CallbackOptions", "Observation"), Silent),
    }
    return {"opentelemetry": {}, "opentelemetry.metrics": metrics}


def _llguidance() -> dict[str, dict[str, Any]]:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("llguidance is not on this machine")

    names = ("LLMatcher", "LLTokenizer", "LLParserLimits")
    return {"llguidance": dict.fromkeys(names, refuse)}
