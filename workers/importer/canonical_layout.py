"""Converts the weights of model families that join, reorder or rename modules to the canonical
layout."""

from __future__ import annotations

from adapters.family_layout import JOINED, NEIGHBOURS
from adapters.manifest import BaseModelShape
from workers.importer.file_tensors import FileTensor
from workers.models.checkpoint import CheckpointError
from workers.models.spec import ModelSpec

NORMS: dict[str, dict[str, str]] = {
    "glm4": {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
}
"""Names of norms in checkpoints of some model types, by model type and then by the norm's name in
canonical folders. Checkpoints of all other model types use the canonical names."""


def is_canonical(spec: ModelSpec) -> bool:
    """Returns whether checkpoints of the model's family already have the canonical layout."""
    own = spec.model_type in JOINED or spec.model_type in NEIGHBOURS or spec.model_type in NORMS
    return not own and not spec.layers[0].rope.rotary_dim


def canonical_layout(
    tensors: dict[str, FileTensor], shape: BaseModelShape
) -> dict[str, FileTensor]:
    """Returns the tensors under their canonical names, with their rows in canonical order.

    tensors: the checkpoint's tensors, by the names that the model family uses. Raises
    CheckpointError if the number of rows of a joined tensor is not the sum of the rows of its
    projections.
    """
    norms = NORMS.get(shape.model_type, {})
    left = dict(tensors)
    laid_out: dict[str, FileTensor] = {}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name, own in norms.items():
            _move(left, f"{prefix}.{own}.weight", laid_out, f"{prefix}.{name}.weight")
        for module, projections in shape.trained_modules(layer).items():
            for kind in ("weight", "bias"):
                if (tensor := left.pop(f"{module}.{kind}", None)) is not None:
                    parts = _parts(f"{module}.{kind}", tensor, shape, projections)
                    for projection, part in zip(projections, parts, strict=True):
                        laid_out[f"{shape.module_path(layer, projection)}.{kind}"] = part
    return left | laid_out


def _move(
    left: dict[str, FileTensor], own: str, laid_out: dict[str, FileTensor], name: str
) -> None:
    if own in left:
        laid_out[name] = left.pop(own)


def _parts(
    name: str, tensor: FileTensor, shape: BaseModelShape, projections: tuple[str, ...]
) -> list[FileTensor]:
    rows = [shape.projection_shape(0, projection)[1] for projection in projections]
    if tensor.shape[0] != sum(rows):
        raise CheckpointError(f"tensor {name} has {tensor.shape[0]} rows, not {sum(rows)}")
    parts: list[FileTensor] = []
    first = 0
    for projection, count in zip(projections, rows, strict=True):
        parts.append(tensor.rows(first, count, shape.row_order(projection)))
        first += count
    return parts
