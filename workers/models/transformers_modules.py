"""Builds transformers models whose linears and attention are computed by our ops."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adapters.installing import install_command
from ops.base import (
    AdaptedLinear,
    ForwardBatch,
    KVCacheView,
    KVLayout,
    LayerAttention,
    LoRABatch,
    Ops,
)
from workers.models.spec import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "loraplex"
"""Name under which our attention function is registered in transformers. No mask function is
registered under this name, so that models compute no attention mask."""


class NotComputable(UnsupportedModel):
    """Error raised if a model has no native family and its code in transformers cannot be used
    either."""

    def __init__(self, model_type: str, why: str) -> None:
        ValueError.__init__(
            self,
            f"model_type = {model_type!r} has no native family, and transformers' code for it "
            f"cannot be used: {why}",
        )


def library() -> Any:
    """Returns the module `transformers`. Raises UnsupportedModel if it is not installed."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise UnsupportedModel(
            "model_type",
            "without a native family",
            f"those of transformers, after: {install_command('transformers')}",
        ) from error


def build_model(
    config: dict[str, Any], dtype: torch.dtype, attention: str | None = ATTENTION
) -> PreTrainedModel:
    """Builds the modules of a causal language model on the meta device.

    attention: name of a registered attention function. If it is None, transformers chooses one.
    Raises UnsupportedModel if transformers is not installed, or too old to know the model.
    """
    transformers = library()
    transformers.AttentionInterface.register(ATTENTION, attend)
    model_type = config["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedModel(
            "model_type", model_type, f"those of transformers {transformers.__version__}"
        )
    parsed = transformers.CONFIG_MAPPING[model_type].from_dict(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            parsed, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    return model.eval()


class Step:
    """Inputs of the forward pass in progress, which the modules of one model read. lora: adapter
    segments of the rows that linears receive, or None if no row has an adapter."""

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self.lora: LoRABatch | None = None

    @property
    def batch(self) -> ForwardBatch:
        assert self._batch is not None, "no forward pass is in progress"
        return self._batch

    @contextmanager
    def of(self, batch: ForwardBatch | None, lora: LoRABatch | None) -> Generator[None]:
        """Sets the inputs of a forward pass for the duration of the context. batch: batch of the
        step, or None if the pass computes no attention."""
        self._batch, self.lora = batch, lora
        try:
            yield
        finally:
            self._batch = self.lora = None


class AdaptedModule(nn.Module):
    """Replacement for a linear module. It has no `weight`, so that code that uses the weight
    directly fails instead of ignoring the adapters."""

    def __init__(self, ops: Ops, linear: AdaptedLinear, layer: int | None, step: Step) -> None:
        """layer: index of the linear's layer in the adapter tables, or None if adapters cannot
        change the linear."""
        super().__init__()
        self.in_features = linear.fused.in_features
        self.out_features = sum(linear.fused.widths)
        self._ops = ops
        self._linear = linear
        self._layer = layer
        self._step = step

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        y = self._ops.linear(rows, self._linear.weight)
        if self._layer is not None and (lora := self._step.lora) is not None:
            self._ops.add_lora(y, rows, self._linear.fused, self._layer, lora)
        return y.view(*x.shape[:-1], self.out_features)


class PagedAttention:
    """Attention of one module over the KV pages of the step's sequences."""

    def __init__(
        self, ops: Ops, step: Step, layout: KVLayout, layer: int, window: int | None
    ) -> None:
        """layout: layout of a KV page. layer: index of the layer of this layout in which the
        module's keys and values are stored. window: number of tokens to which a token attends,
        itself included; None means all preceding tokens."""
        self._ops = ops
        self._step = step
        self._layout = layout
        self._layer = layer
        self._window = window

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Writes keys and values to their pages and computes the attention of each row.
        Shape: query [1, H, T, D], key [1, G, T, D], value [1, G, T, E] -> [1, T, H, E]."""
        batch = self._step.batch
        num_heads, dim = query.shape[1], query.shape[3]
        heads = [self._padded(part[0].transpose(0, 1)) for part in (query, key, value)]
        qkv = torch.cat(heads, dim=1).flatten(1)
        at = LayerAttention(
            *(batch.attention, KVCacheView(batch.kv.arena, self._layout), self._layer, num_heads),
            scale=dim**-0.5 if scale is None else scale,
            window=self._window,
            softcap=softcap,
            sinks=None if sinks is None else sinks.float(),
        )
        self._ops.rope_write_kv(qkv, None, at)
        out = self._ops.paged_attention(qkv, at)
        return out.view(1, len(qkv), num_heads, -1)[..., : value.shape[3]]

    def _padded(self, heads: Tensor) -> Tensor:
        """Pads heads with zeros to the head size of the pages."""
        missing = self._layout.head_dim - heads.shape[-1]
        return nn.functional.pad(heads, (0, missing)) if missing else heads


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Computes a module's attention. Registered in transformers under `ATTENTION`. Ignores
    `attention_mask` and further arguments, because the window was recorded when the model was
    imported, and dropout is used only in training."""
    site: PagedAttention = module.paged_attention  # pyright: ignore[reportAssignmentType]
    return site.attend(query, key, value, scaling, softcap, s_aux), None


class HiddenOutput:
    """Output of a backbone that has only the hidden states. All other fields are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class StoredHidden(nn.Module):
    """Replacement for a causal language model's backbone. It returns its `inputs_embeds`, so that
    the model computes logits from hidden states that are passed to it as `inputs_embeds`."""

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> HiddenOutput:
        return HiddenOutput(inputs_embeds)


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def detach_backbone(model: PreTrainedModel) -> nn.Module:
    """Removes the backbone from the model and returns it. Afterwards, the model computes the logits
    of the hidden states that are passed to it as `inputs_embeds`."""
    backbone: nn.Module = getattr(model, model.base_model_prefix)
    setattr(model, model.base_model_prefix, StoredHidden())
    return backbone
