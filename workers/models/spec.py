"""Model description for the decoder, independent of the field names in a family's config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from workers.layers.rope_spec import RopeSpec

if TYPE_CHECKING:
    from ops.base import Activation


MAX_LAYERS = 1024
"""Maximum number of layers. Every layer takes memory before its weights are found missing."""


class UnsupportedModel(ValueError):
    """Error raised if a config requires a feature that is not supported."""

    def __init__(self, field: str, got: object, allowed: str) -> None:
        super().__init__(f"{field} = {got!r} is not supported; allowed: {allowed}")
        self.field = field
        self.got = got
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Properties that may differ between layers. window: number of tokens to which a token attends,
    itself included; None means all preceding tokens."""

    rope: RopeSpec
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Decoder-only transformer with RMS norms, rotary grouped-query attention and a gated MLP.

    - attention_scale: factor by which q k^T is multiplied.
    - norm_offset: number that is added to every stored norm weight.
    - pre_norms: whether there are norms before attention and before the MLP.
    - post_norms: whether there are norms after attention and after the MLP (Gemma, OLMo).
    - qk_norm: whether each head of q and of k is RMS-normalised before rope.
    - wide_qk_norm: whether q is RMS-normalised over all its heads together, and k over all its
      heads together, before rope.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_scale: float
    eos_token_ids: tuple[int, ...]
    activation: Activation = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    logits_scale: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None

    def served(self, max_model_len: int) -> ModelSpec:
        """Returns the spec for a worker that serves texts of at most `max_model_len` tokens. This
        length selects the factors of LongRoPE."""
        layers = [replace(layer, rope=layer.rope.served(max_model_len)) for layer in self.layers]
        return replace(self, layers=tuple(layers))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


def common_fields(config: dict[str, Any], *own: str) -> dict[str, Any]:
    """Checks the config fields that have the same names in all families, and returns them as
    arguments of `ModelSpec`.

    own: names of optional fields that the calling family reads itself. Raises UnsupportedModel if a
    required field is missing, or if another optional field has an unsupported value.
    """
    _refuse_extensions({name: value for name, value in config.items() if name not in own})
    num_heads = positive(config, "num_attention_heads")
    hidden_size = positive(config, "hidden_size")
    head_dim = config.get("head_dim") or hidden_size // num_heads
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModel("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads}")
    if head_dim % 2:
        raise UnsupportedModel("head_dim", head_dim, "an even number")
    return {
        "model_type": config["model_type"],
        "vocab_size": positive(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": positive(config, "max_position_embeddings"),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attention_scale": head_dim**-0.5,
        "eos_token_ids": end_tokens(config),
    }


def positive(config: dict[str, Any], field: str) -> int:
    """Returns the value of a required field. Raises UnsupportedModel unless it is an integer above
    zero."""
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModel(field, value, "a whole number above zero")
    return value


def require(config: dict[str, Any], field: str, allowed: object, default: object) -> None:
    """Raises UnsupportedModel if the field's value is not `allowed`. default: value that is
    assumed if the field is missing."""
    if (value := config.get(field, default)) != allowed:
        raise UnsupportedModel(field, value, repr(allowed))


def layer_specs(
    config: dict[str, Any],
    ropes: dict[str, RopeSpec],
    window: int | None = None,
    has_window: Callable[[int], bool] | None = None,
) -> tuple[LayerSpec, ...]:
    """Returns one spec per layer. window: number of tokens of the sliding window, or None if no
    layer has one. has_window: function that receives the index of a layer, and returns whether this
    layer has the window. If it is None, all layers have the window. If the config has the field
    `layer_types`, this field decides instead of `has_window`."""
    has_window = has_window or (lambda _: window is not None)
    num_layers = positive(config, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise UnsupportedModel("num_hidden_layers", num_layers, f"at most {MAX_LAYERS}")
    types = config.get("layer_types") or [
        "sliding_attention" if has_window(layer) else "full_attention"
        for layer in range(num_layers)
    ]
    if len(types) != num_layers:
        raise UnsupportedModel("layer_types", types, "one entry a layer")
    windows = {"full_attention": None, "sliding_attention": window}
    if unknown := set(types) - set(windows):
        raise UnsupportedModel("layer_types", min(unknown), ", ".join(windows))
    if "sliding_attention" in types and (window is None or window <= 0):
        raise UnsupportedModel("sliding_window", window, "a whole number above zero")
    return tuple(LayerSpec(ropes[kind], windows[kind]) for kind in types)


def _refuse_extensions(config: dict[str, Any]) -> None:
    for field in ("quantization_config", "auto_map", "num_experts", "num_local_experts"):
        if config.get(field):
            raise UnsupportedModel(field, config[field], "absent")
    require(config, "mlp_bias", False, False)
    require(config, "attention_bias", False, False)
    require(config, "partial_rotary_factor", 1.0, 1.0)
    for field in ("rope_parameters", "rope_scaling"):
        require(config.get(field) or {}, "partial_rotary_factor", 1.0, 1.0)
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention", True, "False")


def end_tokens(config: dict[str, Any]) -> tuple[int, ...]:
    """Returns the config's end token ids, without ids outside the vocabulary, such as -1."""
    value: int | list[int] | None = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(token for token in ids if 0 <= token < config["vocab_size"])
