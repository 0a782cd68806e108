"""Decoder for all native families. Families differ only in the values of their specs."""

from __future__ import annotations

from torch import Tensor

from ops.base import (
    AdaptedLinear,
    ForwardBatch,
    FusedLinear,
    LayerWeights,
    LoRABatch,
    Norm,
    Ops,
    QKNorm,
)
from workers.device.weight_image import Arrival
from workers.layers.decoder_layer import bind_layers
from workers.layers.lm_head import LMHead
from workers.layers.rope_spec import RopeSpec
from workers.layers.rotary import rope_table
from workers.layers.table_rows import replace_embeddings
from workers.models.loader import WeightLoader
from workers.models.plan import ModelPlan
from workers.models.spec import ModelSpec


class Decoder:
    """Loaded base model. It never changes, because the state of a step is stored in the step's
    batch and KV pages."""

    def __init__(self, plan: ModelPlan, loader: WeightLoader) -> None:
        assert isinstance(plan.spec, ModelSpec)
        self.plan = plan
        self._spec = spec = plan.spec
        self.arrival = Arrival() if loader.image is None else loader.image.arrival
        ropes = {
            rope: loader.keep(table)
            for rope, table in rope_tables(spec, plan.max_model_len).items()
        }
        self._ops = loader.ops
        self._table = loader.table("model.embed_tokens.weight")
        self._input_norm = load_input_norm(loader, spec, 0)
        loader.end_part()
        layers: list[LayerWeights] = []
        for layer, layer_spec in enumerate(spec.layers):
            layers.append(load_layer(loader, spec, layer, ropes[layer_spec.rope]))
            loader.end_part()
        self._layers = bind_layers(loader.ops, layers, self.arrival)
        if spec.tie_word_embeddings and loader.ops.shares_tables:
            head = loader.ops.table_linear(self._table)
        else:
            head = loader.linear(["model.embed_tokens" if spec.tie_word_embeddings else "lm_head"])
        self._head = LMHead(loader.ops, head, spec.logits_scale, spec.logits_softcap)
        loader.end_part()
        self.num_bytes = loader.num_bytes

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Computes the hidden states [T, K] of the step's rows, after the final norm."""
        self.arrival.wait(0)
        scale = self._spec.embed_scale
        residual = self._ops.embed(batch.input_ids, self._table, scale)
        if batch.lora is not None:
            replace_embeddings(self._ops, residual, batch.input_ids, batch.lora, scale)
            self._ops.add_embedding_lora(residual, batch.input_ids, batch.lora, scale)
        x = first_input(self._ops, residual, self._input_norm)
        return self._layers.forward(x, residual, batch)

    def logits(
        self, hidden: Tensor, out: Tensor | None = None, lora: LoRABatch | None = None
    ) -> Tensor:
        """Computes the logits, float32 [N, V], of hidden states [N, K], which are rows of the
        result of `forward`. Writes them to `out` if it is given. lora: adapter segments of these
        rows."""
        self.arrival.wait(-1)
        return self._head.forward(hidden, out, lora)


def first_input(ops: Ops, residual: Tensor, norm: Norm | None) -> Tensor:
    """Returns the first layer's input, which is the norm of the embeddings, or the embeddings
    themselves if `norm` is None."""
    return residual if norm is None else ops.rms_norm(residual, norm.weight, norm.eps)


def load_input_norm(loader: WeightLoader, spec: ModelSpec, layer: int) -> Norm | None:
    """Loads the norm before a layer, or returns None if the family has no norms before layers. If
    `layer` is the number of layers, loads the model's final norm instead."""
    if layer == spec.num_layers:
        return load_norm(loader, spec, "model.norm")
    if not spec.pre_norms:
        return None
    return load_norm(loader, spec, f"model.layers.{layer}.input_layernorm")


def load_norm(loader: WeightLoader, spec: ModelSpec, module: str) -> Norm:
    return Norm(loader.norm(module, spec.norm_offset), spec.rms_norm_eps)


def load_layer(loader: WeightLoader, spec: ModelSpec, layer: int, rope: Tensor) -> LayerWeights:
    """Loads the weights of one layer. rope: the layer's rotary table, float32 [positions, D]."""
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    hidden, inner, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_width, spec.kv_width
    qkv = [f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    gate_up = [f"{mlp}.{name}" for name in ("gate_proj", "up_proj")]

    mlp_norm = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"

    def norm(name: str) -> Norm:
        return load_norm(loader, spec, f"{prefix}.{name}")

    return LayerWeights(
        layer,
        spec.num_heads,
        qkv=AdaptedLinear(
            loader.linear(qkv, bias=spec.qkv_bias),
            FusedLinear.of(hidden, q_proj=q, k_proj=kv, v_proj=kv),
        ),
        output=AdaptedLinear(
            loader.linear([f"{attention}.o_proj"]), FusedLinear.of(q, o_proj=hidden)
        ),
        gate_up=AdaptedLinear(
            loader.linear(gate_up), FusedLinear.of(hidden, gate_proj=inner, up_proj=inner)
        ),
        down=AdaptedLinear(
            loader.linear([f"{mlp}.down_proj"]), FusedLinear.of(inner, down_proj=hidden)
        ),
        rope=rope,
        qk_norm=_load_qk_norm(loader, spec, attention) if spec.qk_norm else None,
        scale=spec.attention_scale,
        window=spec.layers[layer].window,
        softcap=spec.attention_softcap,
        activation=spec.activation,
        post_attention_norm=norm("post_attention_layernorm") if spec.post_norms else None,
        mlp_norm=norm(mlp_norm) if spec.pre_norms else None,
        post_mlp_norm=norm("post_feedforward_layernorm") if spec.post_norms else None,
        following_norm=load_input_norm(loader, spec, layer + 1),
        wide_qk_norm=_load_qk_norm(loader, spec, attention) if spec.wide_qk_norm else None,
    )


def _load_qk_norm(loader: WeightLoader, spec: ModelSpec, block: str) -> QKNorm:
    q, k = (loader.norm(f"{block}.{name}", spec.norm_offset) for name in ("q_norm", "k_norm"))
    return QKNorm(q, k, spec.rms_norm_eps)


def rope_tables(spec: ModelSpec, num_positions: int) -> dict[RopeSpec, Tensor]:
    """Returns one rotary table, on the host, for each distinct `RopeSpec` of the model's layers."""
    ropes = {layer.rope for layer in spec.layers}
    return {rope: rope_table(rope, spec.head_dim, num_positions) for rope in ropes}
