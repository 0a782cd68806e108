"""Decoder that runs transformers' code of a model, with our ops and KV pages."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from ops.base import AdaptedLinear, ForwardBatch, FusedLinear, LoRABatch
from workers.device.weight_image import Arrival
from workers.models.checkpoint import canonical_name
from workers.models.loader import WeightLoader
from workers.models.own_modules import OwnModules
from workers.models.plan import ModelPlan
from workers.models.recognition import recognise
from workers.models.transformers_modules import (
    AdaptedModule,
    PagedAttention,
    Step,
    build_model,
    detach_backbone,
    replace_module,
)
from workers.models.transformers_spec import TransformersSpec

log = logging.getLogger(__name__)


class TransformersDecoder:
    """Loaded base model. Used by one thread, because a forward pass stores its inputs in a `Step`
    object that all modules read.

    All weights are a single part of the weight image, so the first step waits until all weights
    have been copied.
    """

    def __init__(self, plan: ModelPlan, loader: WeightLoader) -> None:
        assert isinstance(plan.spec, TransformersSpec)
        self.plan = plan
        self.arrival = Arrival() if loader.image is None else loader.image.arrival
        self._ops = loader.ops
        self._spec = plan.spec
        self._step = Step()
        self._activations = loader.ops.activation_dtype(plan.dtype)
        model = build_model(plan.spec.config, self._activations)
        backbone: nn.Module = getattr(model, model.base_model_prefix)
        found = recognise(
            *(model, backbone, plan.spec),
            lambda name: loader.on_host(self._stored(name)),
            plan.max_model_len,
        )
        log.info("model %s: our ops compute %s", plan.digest[:12], found.describe())
        OwnModules(model, plan, loader, self._step, self._stored).place(found)
        self._place_attention(model)
        self._place_linears(model, loader)
        self._place_others(model, loader)
        loader.end_part()
        self._backbone = detach_backbone(model)
        self._head = model
        self.num_bytes = loader.num_bytes

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Computes the hidden states [T, K] of the step's rows, after the final norm."""
        self.arrival.wait(-1)
        with self._step.of(batch, batch.lora):
            output = self._backbone(
                input_ids=batch.input_ids.unsqueeze(0),
                position_ids=batch.attention.positions.unsqueeze(0).long(),
                use_cache=False,
            )
        return output.last_hidden_state[0]

    def logits(
        self, hidden: Tensor, out: Tensor | None = None, lora: LoRABatch | None = None
    ) -> Tensor:
        """Computes the logits, float32 [N, V], of hidden states [N, K], which are rows of the
        result of `forward`. Writes them to `out` if it is given. lora: adapter segments of these
        rows."""
        self.arrival.wait(-1)
        with self._step.of(None, lora):
            logits = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.to(torch.float32) if out is None else out.copy_(logits)

    def _place_attention(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        for site, (layout, layer) in zip(
            self._spec.recorded.sites, self.plan.site_layouts, strict=True
        ):
            if (module := modules.get(site.module)) is not None:
                attention = PagedAttention(self._ops, self._step, layout, layer, site.window)
                module.paged_attention = attention  # pyright: ignore

    def _place_linears(self, model: nn.Module, loader: WeightLoader) -> None:
        shape, recorded = self._spec.recorded.shape, self._spec.recorded
        modules = dict(model.named_modules())
        for linear in shape.linears:
            if linear.path not in modules:
                continue
            index = shape.projections.index(linear.name)
            fused = FusedLinear((index,), (linear.out_features,), linear.in_features)
            self._place_linear(model, loader, linear.path, fused, linear.layer)
        for path in recorded.plain_linears:
            own = model.get_submodule(path)
            assert isinstance(own, nn.Linear)
            fused = FusedLinear((0,), (own.out_features,), own.in_features)
            self._place_linear(model, loader, path, fused, None)

    def _place_linear(
        self,
        model: nn.Module,
        loader: WeightLoader,
        path: str,
        fused: FusedLinear,
        layer: int | None,
    ) -> None:
        own = model.get_submodule(path)
        assert isinstance(own, nn.Linear)
        stored = self._stored(f"{path}.weight").removesuffix(".weight")
        weight = loader.linear([stored], bias=own.bias is not None)
        module = AdaptedModule(self._ops, AdaptedLinear(weight, fused), layer, self._step)
        replace_module(model, path, module)

    def _place_others(self, model: nn.Module, loader: WeightLoader) -> None:
        """Loads the parameters and buffers of all modules except linears. A tensor that several
        modules share is loaded once."""
        placed: dict[str, nn.Parameter | Tensor] = {}
        for path, module in list(model.named_modules()):
            prefix = f"{path}." if path else ""
            is_table = isinstance(module, nn.Embedding)
            for name in [name for name, own in module._parameters.items() if own is not None]:
                stored = self._stored(prefix + name)
                if stored not in placed:
                    dtype = self.plan.dtype if is_table else self._activations
                    tensor = loader.tensor(stored, dtype)
                    placed[stored] = nn.Parameter(tensor, requires_grad=False)
                module._parameters[name] = placed[stored]  # pyright: ignore[reportArgumentType]
            for name in [name for name, own in module._buffers.items() if own is not None]:
                stored = self._stored(prefix + name)
                if stored not in placed:
                    placed[stored] = loader.tensor(stored, None)
                module._buffers[name] = placed[stored]
            if is_table:
                module.register_forward_hook(self._widen)

    def _widen(self, module: nn.Module, inputs: object, rows: Tensor) -> Tensor:
        """Converts rows of an embedding table to the dtype of activations."""
        return rows.to(self._activations)

    def _stored(self, name: str) -> str:
        return canonical_name(self._spec.recorded.aliases.get(name, name))
