"""The one decoder behind every family: what differs between them is data in the spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapters.manifest import BaseModelShape
from ops.base import KVLayout, Ops, QKNorm
from workers.batch import ForwardBatch
from workers.layers.attention import Attention
from workers.layers.embedding import Embedding, LMHead
from workers.layers.linear import Linear, make_site
from workers.layers.mlp import GatedMLP
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RopeSpec, rope_table
from workers.models import read_spec
from workers.models.checkpoint import Checkpoint, weight_files
from workers.models.loader import WeightLoader
from workers.models.progress import Progress, ProgressMeter
from workers.models.spec import ModelSpec


class DecoderLayer:
    """Attention and MLP around one residual stream; ends with the norm that its follower wants."""

    def __init__(self, loader: WeightLoader, spec: ModelSpec, layer: int, rope: Tensor) -> None:
        prefix = f"model.layers.{layer}"
        self.attention = _load_attention(loader, spec, layer, rope)
        self.mlp = _load_mlp(loader, spec, layer)
        post_attention = load_norm(loader, spec, f"{prefix}.post_attention_layernorm")
        self.post_attention_norm: RMSNorm | None = None
        self.post_mlp_norm: RMSNorm | None = None
        self.mlp_norm = post_attention
        if spec.post_norms:
            self.post_attention_norm = post_attention
            self.mlp_norm = load_norm(loader, spec, f"{prefix}.pre_feedforward_layernorm")
            self.post_mlp_norm = load_norm(loader, spec, f"{prefix}.post_feedforward_layernorm")
        last = layer == spec.num_layers - 1
        following = "model.norm" if last else f"model.layers.{layer + 1}.input_layernorm"
        self.following_norm = load_norm(loader, spec, following)

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, K] is the norm of the residual [T, K], which is changed in place."""
        x = self.attention.forward(x, batch)
        if self.post_attention_norm is not None:
            x = self.post_attention_norm.forward(x)
        x = self.mlp_norm.forward(x, residual)
        x = self.mlp.forward(x, batch.lora)
        if self.post_mlp_norm is not None:
            x = self.post_mlp_norm.forward(x)
        return self.following_norm.forward(x, residual)


class Decoder:
    """A loaded base model. Immutable: a step's state is in its batch and the pages it points to."""

    def __init__(
        self,
        loader: WeightLoader,
        spec: ModelSpec,
        shape: BaseModelShape,
        dtype: torch.dtype,
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self.shape = shape
        self.max_model_len = max_model_len
        self.kv_layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
        ropes = rope_tables(spec, max_model_len, loader.ops.device)
        table = loader.table("model.embed_tokens.weight")
        head = "model.embed_tokens" if spec.tie_word_embeddings else "lm_head"
        self._embedding = Embedding(loader.ops, table, spec.embed_scale)
        self._input_norm = load_norm(loader, spec, "model.layers.0.input_layernorm")
        self._layers = [
            DecoderLayer(loader, spec, layer, ropes[layer_spec.rope])
            for layer, layer_spec in enumerate(spec.layers)
        ]
        self._head = LMHead(loader.ops, loader.linear([head]), spec.logits_softcap)

    @classmethod
    def load(
        cls,
        folder: Path,
        digest: str,
        ops: Ops,
        dtype: torch.dtype,
        *,
        max_model_len: int | None = None,
        progress: Progress | None = None,
    ) -> Decoder:
        """Reads a canonical folder and packs its weights one by one.

        dtype: of weights and KV pages, bfloat16 or float32.
        Raises UnsupportedModel or CheckpointError.
        """
        config = _read_json(folder / "config.json")
        spec = read_spec(config, _read_json(folder / "generation_config.json"))
        meter = ProgressMeter(sum(path.stat().st_size for path in weight_files(folder)), progress)
        length = min(max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
        with Checkpoint(folder) as checkpoint:
            checkpoint.check(spec)
            loader = WeightLoader(checkpoint, ops, dtype, meter)
            model = cls(loader, spec, BaseModelShape.from_config(config, digest), dtype, length)
        meter.finish()
        return model

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, K] of the step's rows, the final norm applied."""
        residual = self._embedding.forward(batch.input_ids)
        x = self._input_norm.forward(residual)
        for layer in self._layers:
            x = layer.forward(x, residual, batch)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward` [N, K] -> float32 [N, V]."""
        return self._head.forward(hidden)


def load_norm(loader: WeightLoader, spec: ModelSpec, module: str) -> RMSNorm:
    return RMSNorm(loader.ops, loader.norm(module, spec.norm_offset), spec.rms_norm_eps)


def _load_attention(loader: WeightLoader, spec: ModelSpec, layer: int, rope: Tensor) -> Attention:
    block = f"model.layers.{layer}.self_attn"
    q, kv = spec.q_width, spec.kv_width
    qkv_site = make_site(spec.hidden_size, q_proj=q, k_proj=kv, v_proj=kv)
    modules = [f"{block}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    qkv = loader.linear(modules, bias=spec.qkv_bias)
    output = loader.linear([f"{block}.o_proj"])
    return Attention(
        loader.ops,
        layer,
        spec.num_heads,
        scale=spec.attention_scale,
        window=spec.layers[layer].window,
        softcap=spec.attention_softcap,
        qkv=Linear(loader.ops, qkv, qkv_site, layer),
        output=Linear(loader.ops, output, make_site(q, o_proj=spec.hidden_size), layer),
        rope=rope,
        qk_norm=_load_qk_norm(loader, spec, block) if spec.qk_norm else None,
    )


def _load_qk_norm(loader: WeightLoader, spec: ModelSpec, block: str) -> QKNorm:
    q, k = (loader.norm(f"{block}.{name}", spec.norm_offset) for name in ("q_norm", "k_norm"))
    return QKNorm(q, k, spec.rms_norm_eps)


def _load_mlp(loader: WeightLoader, spec: ModelSpec, layer: int) -> GatedMLP:
    block = f"model.layers.{layer}.mlp"
    inner = spec.intermediate_size
    gate_up_site = make_site(spec.hidden_size, gate_proj=inner, up_proj=inner)
    gate_up = loader.linear([f"{block}.gate_proj", f"{block}.up_proj"])
    down = loader.linear([f"{block}.down_proj"])
    return GatedMLP(
        loader.ops,
        spec.activation,
        Linear(loader.ops, gate_up, gate_up_site, layer),
        Linear(loader.ops, down, make_site(inner, down_proj=spec.hidden_size), layer),
    )


def rope_tables(
    spec: ModelSpec, num_positions: int, device: torch.device
) -> dict[RopeSpec, Tensor]:
    """One table for each distinct rope of the model's layers."""
    ropes = {layer.rope for layer in spec.layers}
    return {rope: rope_table(rope, spec.head_dim, num_positions).to(device) for rope in ropes}


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
