"""Parser of adapter_config.json as peft 0.10 to 0.21 writes it. Each key is supported, harmless or
refused.

Semantics follow peft's tuners/lora/model.py, tuners/tuners_utils.py and utils/other.py. Torch-free.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from adapters.errors import AdapterRejected
from adapters.format.patterns import PatternMatcher
from adapters.format.strict_json import decode_object, find_nul
from adapters.manifest import OUTER

T = TypeVar("T")

MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 4096
MAX_SCALE = 1e6
MAX_INVOCATION_TOKENS = 1024

REFUSED = {
    "use_dora": "dora",
    "lora_bias": "lora_bias",
    "layer_replication": "layer_replication",
    "fan_in_fan_out": "fan_in_fan_out",
    "megatron_config": "megatron",
    "loftq_config": "loftq",
    "corda_config": "corda",
    "lora_ga_config": "lora_ga",
    "use_qalora": "qalora",
    "use_bdlora": "bdlora",
    "arrow_config": "arrow",
    "kasa_config": "kasa",
    "velora_config": "velora",
    "monteclora_config": "monteclora",
}
"""Config keys of unsupported features that change the computation, each with the last part of its
error code. A feature is off if the value of its key is null, false, {} or []."""

HARMLESS = {
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "peft_version",
    "lora_dropout",
    "eva_config",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "lora_dtype",
    "lorap_lr_ratio",
    "lorap_emb_lr",
}
"""Config keys that do not affect the forward pass. `base_model_name_or_path` is never opened as a
path or repository. The last three keys are training options of ms-swift."""

TASKS = ("CAUSAL_LM", "FEATURE_EXTRACTION")
"""Task types that are served. CAUSAL_LM trains the base model with its output matrix, and
FEATURE_EXTRACTION without it."""

ZERO_INITS = (True, "gaussian", "eva")
"""`init_lora_weights` values with which B starts at zero, so that a targeted module without tensors
has no effect."""

PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")
"""`init_lora_weights` values that leave the base weights as they are."""


class LoRAConfig(msgspec.Struct, frozen=True):
    """Fields of adapter_config.json that affect the computation, with the names that peft uses."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    init_lora_weights: bool | str = True
    alora_invocation_tokens: tuple[int, ...] | None = None
    modules_to_save: tuple[str, ...] | None = None
    trainable_token_indices: tuple[int, ...] | dict[str, tuple[int, ...]] | None = None
    target_parameters: tuple[str, ...] | None = None
    ensure_weight_tying: bool | None = None
    """Whether changes of a tied embedding are also changes of the output matrix, and vice versa."""

    def has_parameter(self, module: str) -> bool:
        """Returns whether the module's factors belong to a parameter in `target_parameters`."""
        owners = [name.rpartition(".")[0] for name in self.target_parameters or ()]
        return any(module == owner or module.endswith(f".{owner}") for owner in owners)

    @property
    def saved_modules(self) -> set[str]:
        """Modules whose whole weight the adapter replaces, by the last part of their path."""
        return {_last_part(name) for name in self.modules_to_save or ()}

    @property
    def trained_tokens(self) -> dict[str, tuple[int, ...]]:
        """Ids of tokens whose rows the adapter replaces, by the last part of the module's path."""
        tokens = self.trainable_token_indices or {}
        if not isinstance(tokens, dict):
            return {"embed_tokens": tokens}
        return {_last_part(name): each for name, each in tokens.items()}

    def rank(self, module: str, matcher: PatternMatcher) -> int:
        return _lookup(self.rank_pattern, module, self.r, matcher)

    def scale(self, module: str, rank: int, matcher: PatternMatcher) -> float:
        """Returns alpha divided by the module's rank or, with rsLoRA, by the rank's square root."""
        alpha = _lookup(self.alpha_pattern, module, self.lora_alpha, matcher)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str, layer: int | None, matcher: PatternMatcher) -> bool:
        """Whether peft would adapt this module. layer: number of the module's layer, or None if the
        module is outside of the layers."""
        if self.exclude_modules and _is_named(self.exclude_modules, module, matcher):
            return False
        if isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear":
            return layer is not None
        if not _is_named(self.target_modules, module, matcher):
            return False
        return isinstance(self.target_modules, str) or self._is_layer(module, layer, matcher)

    def _is_layer(self, module: str, layer: int | None, matcher: PatternMatcher) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        if layer is None:
            return False
        patterns = self.layers_pattern or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        # \d+ matches the layer's number, because no other part of a module's path is a number.
        found = not patterns or any(
            matcher.match(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.", module) for pattern in patterns
        )
        return found and (layer == wanted if isinstance(wanted, int) else layer in wanted)


def parse_config(raw: bytes) -> LoRAConfig:
    """Parses an adapter_config.json. Raises AdapterRejected with a code adapter.config.* (invalid),
    adapter.unsupported.* (unsupported) or adapter.file.git_lfs."""
    if raw.startswith(b"version https://git-lfs"):
        raise AdapterRejected("adapter.file.git_lfs", "adapter_config.json", "a Git LFS pointer")
    values = decode_object(raw, "adapter.config.invalid", "adapter_config.json")
    if (path := find_nul(values)) is not None:
        raise AdapterRejected("adapter.config.invalid", path, "text with the character U+0000")
    _check_kind(values)
    for key, value in values.items():
        _check_key(key, value)
    supported = {key: values[key] for key in LoRAConfig.__struct_fields__ if key in values}
    try:
        config = msgspec.convert(supported, LoRAConfig)
    except msgspec.ValidationError as error:
        raise AdapterRejected("adapter.config.invalid", *_locate(str(error))) from None
    _check_values(config)
    _check_tables(config)
    if config.alora_invocation_tokens is not None:
        _check_invocation(config.alora_invocation_tokens, values.get("task_type"))
    return config


def _check_kind(values: dict[str, Any]) -> None:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise AdapterRejected("adapter.unsupported.peft_type", "peft_type", kind, ["LORA"])
    task = values.get("task_type")
    if task not in (None, *TASKS):
        raise AdapterRejected("adapter.unsupported.task_type", "task_type", task, [*TASKS])
    mapping = values.get("auto_mapping")
    if mapping is not None and not _is_served_class(mapping):
        raise AdapterRejected("adapter.unsupported.auto_mapping", "auto_mapping", mapping)


SERVED_CLASSES = ("ForCausalLM", "ForConditionalGeneration", "Model")


class AutoMapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Value of `auto_mapping`: the class of the base model that an adapter was trained on."""

    base_model_class: str
    parent_library: str | None = None
    unsloth_fixed: bool | None = None


def _is_served_class(mapping: Any) -> bool:
    """Whether the base model's class is a decoder, with or without its output matrix. peft writes
    the class if no task type was given, and Unsloth always writes it. The class is not imported."""
    try:
        known = msgspec.convert(mapping, AutoMapping)
    except msgspec.ValidationError:
        return False
    is_known = known.parent_library is None or known.parent_library.startswith(
        "transformers.models."
    )
    return is_known and known.base_model_class.endswith(SERVED_CLASSES)


def _check_key(key: str, value: Any) -> None:
    is_neutral = value is None or value is False or value in ({}, [])
    if key in REFUSED:
        if not is_neutral:
            raise AdapterRejected(f"adapter.unsupported.{REFUSED[key]}", key, value, [None])
    elif key == "bias":
        if value != "none":
            raise AdapterRejected("adapter.unsupported.bias", key, value, ["none"])
    elif key == "init_lora_weights":
        _check_init(value)
    elif key not in HARMLESS and key not in KNOWN and not is_neutral:
        raise AdapterRejected("adapter.config.unknown_key", key, value)


def _check_init(value: Any) -> None:
    if isinstance(value, bool | str) and value in PLAIN_INITS:
        return
    name = str(value).split("_niter_")[0].lower()
    known = name in {"pissa", "olora", "corda", "loftq", "lora_ga", "mica"}
    raise AdapterRejected(
        f"adapter.unsupported.{name if known else 'init_lora_weights'}",
        "init_lora_weights",
        value,
        list(PLAIN_INITS),
    )


def _check_values(config: LoRAConfig) -> None:
    ranks = [config.r, *(config.rank_pattern or {}).values()]
    if min(ranks) < 1:
        raise AdapterRejected("adapter.config.rank", "r", min(ranks), "at least 1")
    alphas = [config.lora_alpha, *(config.alpha_pattern or {}).values()]
    if not all(math.isfinite(alpha) and abs(alpha) <= MAX_SCALE for alpha in alphas):
        raise AdapterRejected("adapter.config.alpha", "lora_alpha", max(alphas, key=abs), MAX_SCALE)
    if len(ranks) + len(alphas) > MAX_PATTERNS:
        raise AdapterRejected(
            "adapter.config.too_many_patterns",
            "rank_pattern",
            len(ranks) + len(alphas),
            MAX_PATTERNS,
        )
    if isinstance(config.target_modules, str) and config.layers_to_transform is not None:
        raise AdapterRejected(
            "adapter.config.invalid", "layers_to_transform", "with a regular expression", [None]
        )


def _check_tables(config: LoRAConfig) -> None:
    """Raises AdapterRejected unless all replaced weights belong to the embedding or the output
    matrix (see OUTER), and no token is listed twice."""
    if not config.saved_modules <= {*OUTER}:
        got = list(config.modules_to_save or ())
        code = "adapter.unsupported.modules_to_save"
        raise AdapterRejected(code, "modules_to_save", got, [*OUTER])
    field, named = "trainable_token_indices", config.trainable_token_indices
    tokens = config.trained_tokens
    if not tokens.keys() <= {*OUTER} or (isinstance(named, dict) and len(tokens) < len(named)):
        raise AdapterRejected("adapter.unsupported.trainable_tokens", field, named, [*OUTER])
    for each in tokens.values():
        twice = [token for token, following in pairwise(sorted(each)) if token == following]
        if twice:
            raise AdapterRejected("adapter.config.token_indices", field, twice[0], "once each")


def _check_invocation(tokens: tuple[int, ...], task: Any) -> None:
    if task != "CAUSAL_LM":
        raise AdapterRejected(
            "adapter.unsupported.task_type",
            "task_type",
            task,
            ["CAUSAL_LM"],
            "peft activates an aLoRA in models of this task type only: set it in LoraConfig.",
        )
    if not 1 <= len(tokens) <= MAX_INVOCATION_TOKENS:
        raise AdapterRejected(
            "adapter.config.invocation_tokens",
            "alora_invocation_tokens",
            len(tokens),
            f"1 to {MAX_INVOCATION_TOKENS} token ids",
        )


def _is_named(names: list[str] | str, module: str, matcher: PatternMatcher) -> bool:
    """Whether `names` matches the path `module`. A string is a regular expression for the whole
    path. A list contains whole paths and endings of paths."""
    if isinstance(names, str):
        return matcher.fullmatch(names, module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _last_part(path: str) -> str:
    return path.rpartition(".")[2]


def _lookup(patterns: dict[str, T] | None, module: str, default: T, matcher: PatternMatcher) -> T:
    """Returns the value of the first pattern that matches the path or an ending of the path, as
    peft's get_pattern_key does. Returns the default if no pattern matches."""
    for key, value in (patterns or {}).items():
        if matcher.ends_with(key, module):
            return value
    return default


def _locate(message: str) -> tuple[str, str]:
    """Returns (field, reason) of a msgspec error such as 'Expected `int`, got `str` - at `$.r`'."""
    reason, _, path = message.partition(" - at `$")
    return path.strip("`.") or "adapter_config.json", reason


KNOWN = {*LoRAConfig.__struct_fields__, "peft_type", "task_type", "auto_mapping"}
