"""Computes log-probabilities of a few tokens for several adapters in one pass through the model,
with transformers' code for the model and its attention.

A module's weights are read when the module is called and dropped afterwards, so that scoring needs
little memory alongside the served model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from adapters.pool.factors import Factors
from ops.block_matrix import densify
from workers.models.checkpoint import Checkpoint, canonical_name
from workers.models.transformers_modules import build_model
from workers.models.transformers_spec import TransformersSpec


@torch.inference_mode()
def score_with_transformers(
    folder: Path,
    spec: TransformersSpec,
    dtype: torch.dtype,
    tokens: list[int],
    adapters: Sequence[Factors],
    *,
    on_linear: Callable[[], None],
) -> Tensor:
    """Computes the log-probability of each token except the first, float32 [len(adapters) + 1,
    len(tokens) - 1]. There is one row for each adapter, and a last row for the base model.

    on_linear: function that is called after each linear that adapters can change.
    """
    model = build_model(spec.config, torch.float32, attention=None)
    shape = spec.recorded.shape
    with Checkpoint(folder) as checkpoint:
        weights = _Weights(checkpoint, spec, dtype)
        for path, module in model.named_modules():
            if module._parameters or module._buffers:
                _read_when_called(module, path, weights)
        for linear in shape.linears:
            at = linear.layer, shape.projections.index(linear.name)
            module = model.get_submodule(linear.path)
            _add_when_called(module, adapters, at)
            module.register_forward_hook(lambda *_: on_linear())
        count = len(adapters) + 1
        ids = torch.tensor([tokens] * count)
        positions = torch.arange(len(tokens)).expand(count, -1)
        output = model(input_ids=ids, position_ids=positions, use_cache=False)
    scores = output.logits[:, :-1].double().log_softmax(-1)
    return scores.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2).float()


class _Weights:
    """Tensors of a canonical folder, read as float32. Matrices are first rounded to the serving
    dtype, as in a worker."""

    def __init__(self, checkpoint: Checkpoint, spec: TransformersSpec, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._aliases = spec.recorded.aliases
        self._dtype = dtype
        self._matrices = {f"{path}.weight" for path in spec.linears}

    def read(self, name: str, *, is_table: bool) -> Tensor:
        weight = densify([self._checkpoint.get(canonical_name(self._aliases.get(name, name)))])
        if not weight.is_floating_point():
            return weight
        if is_table or name in self._matrices:
            weight = weight.to(self._dtype)
        return weight.float()


def _add_when_called(module: nn.Module, adapters: Sequence[Factors], at: tuple[int, int]) -> None:
    """Makes the linear add the LoRA product of adapter i to its output for text i. The last text
    has no adapter, so its output is unchanged. at: layer and projection of the linear."""

    def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        for x, y, factors in zip(inputs[0], output, adapters, strict=False):
            if (found := factors.read(*at)) is not None:
                y += x @ found[0].T @ found[1].T

    module.register_forward_hook(add)


def _read_when_called(module: nn.Module, path: str, weights: _Weights) -> None:
    """Makes the module hold its tensors only while it is called."""
    prefix = f"{path}." if path else ""
    parameters, buffers = dict(module._parameters), dict(module._buffers)

    def fill(*_: object) -> None:
        for held in (module._parameters, module._buffers):
            for name, empty in list(held.items()):
                if empty is not None:
                    tensor = weights.read(prefix + name, is_table=isinstance(module, nn.Embedding))
                    if held is module._parameters:
                        tensor = nn.Parameter(tensor, requires_grad=False)
                    held[name] = tensor  # pyright: ignore[reportArgumentType]

    def drop(*_: object) -> None:
        module._parameters.update(parameters)
        module._buffers.update(buffers)

    module.register_forward_pre_hook(fill)
    module.register_forward_hook(drop)
