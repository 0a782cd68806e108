"""Modules that replace recognised modules of a transformers model. Our ops compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from adapters.manifest import ModelLinear
from ops.base import (
    Activation,
    AdaptedLinear,
    FusedLinear,
    KVCacheView,
    KVLayout,
    LayerAttention,
    LayerStack,
    LayerWeights,
    Norm,
    Ops,
    QKNorm,
)
from workers.device.weight_image import Arrival
from workers.layers.decoder_layer import bind_layers
from workers.models.decoder import first_input
from workers.models.loader import WeightLoader
from workers.models.plan import ModelPlan
from workers.models.recognition import (
    FoundAttention,
    FoundLayer,
    FoundLayers,
    FoundNorm,
    Recognised,
)
from workers.models.transformers_modules import AdaptedModule, Step, replace_module
from workers.models.transformers_spec import AttentionSite, TransformersSpec


class NormModule(nn.Module):
    """RMS norm of the last dimension."""

    def __init__(self, ops: Ops, norm: Norm) -> None:
        super().__init__()
        self._ops = ops
        self._norm = norm

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._ops.rms_norm(rows, self._norm.weight, self._norm.eps).view(x.shape)


class GatedMLP(nn.Module):
    """MLP whose gate and up projections are one linear."""

    def __init__(
        self, ops: Ops, gate_up: AdaptedModule, down: AdaptedModule, activation: Activation
    ) -> None:
        super().__init__()
        self._ops = ops
        self._gate_up = gate_up
        self._down = down
        self._activation: Activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self._gate_up(x.reshape(-1, x.shape[-1]))
        return self._down(self._ops.gated_activation(gate_up, self._activation)).view(x.shape)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights and settings of attention, as in `LayerWeights`. layer: index of the layer of
    `layout` in which keys and values are stored."""

    rope: Tensor
    norms: QKNorm | None
    num_heads: int
    scale: float
    window: int | None
    softcap: float | None
    layout: KVLayout
    layer: int


class FusedAttention(nn.Module):
    """Attention over KV pages whose q, k and v projections are one linear."""

    def __init__(
        self,
        ops: Ops,
        step: Step,
        qkv: AdaptedModule,
        output: AdaptedModule,
        weights: AttentionWeights,
    ) -> None:
        super().__init__()
        self._ops = ops
        self._step = step
        self._qkv = qkv
        self._output = output
        self._weights = weights

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        w, batch = self._weights, self._step.batch
        view = KVCacheView(batch.kv.arena, w.layout)
        at = LayerAttention(
            *(batch.attention, view, w.layer, w.num_heads, w.scale, w.window, w.softcap)
        )
        qkv = self._qkv(hidden_states.reshape(-1, hidden_states.shape[-1]))
        self._ops.rope_write_kv(qkv, w.rope, at, w.norms)
        y = self._output(self._ops.paged_attention(qkv, at))
        return y.view(*hidden_states.shape[:-1], -1), None


class AllLayers(nn.Module):
    """All layers of a model and the norm after them, in the place of the first layer."""

    def __init__(
        self, ops: Ops, step: Step, input_norm: Norm | None, layers: list[LayerWeights]
    ) -> None:
        super().__init__()
        self._ops = ops
        self._step = step
        self._input_norm = input_norm
        # The decoder waits for all weights before it calls the model.
        self._layers: LayerStack = bind_layers(ops, layers, Arrival())

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        residual = hidden_states[0].contiguous()
        x = first_input(self._ops, residual, self._input_norm)
        return self._layers.forward(x, residual, self._step.batch).unsqueeze(0)


class OwnModules:
    """Loads the weights of recognised modules and puts our own modules in their places."""

    def __init__(
        self,
        model: nn.Module,
        plan: ModelPlan,
        loader: WeightLoader,
        step: Step,
        stored: Callable[[str], str],
    ) -> None:
        """stored: function that returns the stored name of a tensor, by its name in the model."""
        assert isinstance(plan.spec, TransformersSpec)
        self._model = model
        self._plan = plan
        self._loader = loader
        self._ops = loader.ops
        self._step = step
        self._stored = stored
        self._sites = plan.spec.recorded.sites

    def place(self, found: Recognised) -> None:
        """Replaces all recognised modules. Layers are replaced as a whole if all are recognised."""
        ropes = [self._loader.keep(table) for table in found.ropes]
        if found.layers is not None:
            self._place_layers(found.layers, ropes)
            return
        for site, place in zip(self._sites, self._plan.site_layouts, strict=True):
            if (attention := found.attentions.get(site.module)) is not None:
                module = self._attention(attention, site, place, ropes)
                replace_module(self._model, site.module, module)
        for path, mlp in found.mlps.items():
            gate_up, down = (self._adapted(*part) for part in ((mlp.gate, mlp.up), (mlp.down,)))
            replace_module(self._model, path, GatedMLP(self._ops, gate_up, down, mlp.activation))
        for path, norm in found.norms.items():
            if not path.startswith(tuple(f"{replaced}." for replaced in found.attentions)):
                replace_module(self._model, path, NormModule(self._ops, self._norm(norm)))

    def _place_layers(self, found: FoundLayers, ropes: list[Tensor]) -> None:
        following = [*(layer.attention_norm for layer in found.layers[1:]), found.final_norm]
        input_norm = self._optional_norm(found.layers[0].attention_norm)
        weights = [
            self._layer(index, layer, norm, ropes)
            for index, (layer, norm) in enumerate(zip(found.layers, following, strict=True))
        ]
        layers = AllLayers(self._ops, self._step, input_norm, weights)
        replace_module(self._model, found.path, nn.ModuleList([layers]))
        replace_module(self._model, found.final_norm.path, nn.Identity())

    def _layer(
        self, index: int, found: FoundLayer, following: FoundNorm | None, ropes: list[Tensor]
    ) -> LayerWeights:
        attention, mlp, site = found.attention, found.mlp, self._sites[index]
        return LayerWeights(
            index,
            site.num_heads,
            qkv=self._linear(attention.q, attention.k, attention.v),
            output=self._linear(attention.output),
            gate_up=self._linear(mlp.gate, mlp.up),
            down=self._linear(mlp.down),
            rope=ropes[attention.rope],
            qk_norm=self._head_norms(attention),
            scale=attention.scale,
            window=site.window,
            softcap=attention.softcap,
            activation=mlp.activation,
            post_attention_norm=self._optional_norm(found.post_attention_norm),
            mlp_norm=self._optional_norm(found.mlp_norm),
            post_mlp_norm=self._optional_norm(found.post_mlp_norm),
            following_norm=self._optional_norm(following),
        )

    def _attention(
        self,
        found: FoundAttention,
        site: AttentionSite,
        place: tuple[KVLayout, int],
        ropes: list[Tensor],
    ) -> FusedAttention:
        qkv, output = self._adapted(found.q, found.k, found.v), self._adapted(found.output)
        settings = (site.num_heads, found.scale, site.window, found.softcap)
        weights = AttentionWeights(ropes[found.rope], self._head_norms(found), *settings, *place)
        return FusedAttention(self._ops, self._step, qkv, output, weights)

    def _adapted(self, *linears: ModelLinear) -> AdaptedModule:
        return AdaptedModule(self._ops, self._linear(*linears), linears[0].layer, self._step)

    def _linear(self, *linears: ModelLinear) -> AdaptedLinear:
        """Loads linears of one layer as one linear."""
        names = [self._stored(f"{each.path}.weight").removesuffix(".weight") for each in linears]
        bias = self._model.get_submodule(linears[0].path).bias is not None
        index = self._plan.shape.projections.index
        fused = FusedLinear(
            tuple(index(each.name) for each in linears),
            tuple(each.out_features for each in linears),
            linears[0].in_features,
        )
        return AdaptedLinear(self._loader.linear(names, bias=bias), fused)

    def _head_norms(self, found: FoundAttention) -> QKNorm | None:
        if found.norms is None:
            return None
        q, k = (self._norm(norm) for norm in found.norms)
        return QKNorm(q.weight, k.weight, q.eps)

    def _optional_norm(self, found: FoundNorm | None) -> Norm | None:
        return None if found is None else self._norm(found)

    def _norm(self, found: FoundNorm) -> Norm:
        module = self._stored(f"{found.path}.weight").removesuffix(".weight")
        return Norm(self._loader.norm(module, found.offset), found.eps)
