"""Scores of a few tokens by the modelling file of transformers with its own attention.

Weights are read when their module is called and dropped afterwards, so that it needs little memory
beside a served model.
"""

from __future__ import annotations

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
    factors: Factors | None = None,
) -> Tensor:
    """Computes log-probabilities float32 [len(tokens), V] of what follows each token.

    folder: a canonical model. dtype: what it is served in; matrices are rounded so. factors: of the
    adapter, if any, in full precision.
    """
    model = build_model(spec.config, torch.float32, attention=None)
    with Checkpoint(folder) as checkpoint:
        weights = _Weights(checkpoint, spec, dtype, factors)
        for path, module in model.named_modules():
            if module._parameters or module._buffers:
                _read_when_called(module, path, weights)
        output = model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.arange(len(tokens)).unsqueeze(0),
            use_cache=False,
        )
    return output.logits[0].double().log_softmax(-1).float()


class _Weights:
    """Tensors of a canonical folder in float32, with an adapter's products added to them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: TransformersSpec,
        dtype: torch.dtype,
        factors: Factors | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._aliases = spec.recorded.aliases
        self._dtype = dtype
        self._factors = factors
        shape = spec.recorded.shape
        self._sites = {
            f"{linear.path}.weight": (linear.layer, shape.projections.index(linear.name))
            for linear in shape.linears
        }
        self._matrices = {f"{path}.weight" for path in spec.linears}

    def read(self, name: str, *, is_table: bool) -> Tensor:
        weight = densify([self._checkpoint.get(canonical_name(self._aliases.get(name, name)))])
        if not weight.is_floating_point():
            return weight
        if is_table or name in self._matrices:
            weight = weight.to(self._dtype)
        weight = weight.float()
        site = self._sites.get(name)
        found = None if self._factors is None or site is None else self._factors.read(*site)
        return weight if found is None else torch.addmm(weight, found[1], found[0])


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
