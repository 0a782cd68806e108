"""Parser of tensor names, each of which identifies a module and a factor. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from adapters.errors import AdapterRejected

PREFIX = "base_model.model."
ROOTS = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""Path prefixes of the module that contains the decoder layers. The first is the prefix in a causal
language model. The next three occur in models of text and images: in two generations of
transformers, and as loaded by AutoModel. The last is the prefix in a language model that AutoModel
loads without its output matrix."""

HEADS = {"model.": "lm_head", "model.language_model.": "lm_head"} | {
    "language_model.model.": "language_model.lm_head"
}
"""Path of the output matrix by root (element of ROOTS). Other roots have no output matrix."""

WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Path parts that torch.compile, DistributedDataParallel, FSDP and activation checkpointing add."""

DOUBLED = ((PREFIX, ""), ("model.model.", "model."))
"""Beginnings of module paths to which a prefix was added twice, each with the corrected beginning.
"""

UNSUPPORTED = (
    (r"^lora_unet_|^lora_te|\.lora_(down|up)\.", "kohya"),
    (r"\.lora_[ab]$", "mlx"),
    (r"\.lora_magnitude_vector(\.|$)", "dora"),
    (r"\.lora_[AB](\.[^.]+)?\.bias$", "lora_bias"),
    (r"\.lora_diag(\.|$)", "kasa"),
    (r"\.base_layer\.", "base_weights"),
    (r"^prompt_embeddings$", "prompt_tuning"),
    (r"\.trainable_tokens_", "trainable_tokens"),
    (r"\.modules_to_save\.", "modules_to_save"),
    (r"(norm|\.norm\d|\.ln_\w+)\.weight$", "norm"),
    (r"\.bias$", "bias"),
)
"""Patterns of the names of tensors that are no factors, each with the last part of its error code.
The first pattern that matches decides, whatever the config says."""
UNSUPPORTED_MODULES = {
    "base_layer": "nested_adapter",
    "vision_tower": "vision",
    "multi_modal_projector": "vision",
    "visual": "vision",
    "experts": "experts",
}
"""Parts of the paths of modules that an adapter cannot change, with the last part of the error
code."""

_NAME = re.compile(
    r"base_model\.model\.(?P<path>.+)\.lora_(?P<factor>[AB])(?:\.(?P<adapter>[^.]+))?\.weight",
    re.DOTALL,
)
_EMBEDDING = re.compile(
    r"base_model\.model\.(?P<path>(?:.+\.)?embed_tokens)\.lora_embedding_(?P<factor>[AB])"
    r"(?:\.(?P<adapter>[^.]+))?",
    re.DOTALL,
)
_COPY = re.compile(
    r"base_model\.model\.(?P<path>(?:.+\.)?(?:embed_tokens|lm_head))\.base_layer\.weight", re.DOTALL
)
"""Pattern for the name of a base model weight that peft saves together with the factors of the
embedding or of the output matrix."""
_TABLE = re.compile(
    r"base_model\.model\.(?P<path>(?:.+\.)?(?:embed_tokens|lm_head))"
    r"(?:\.modules_to_save(?:\.[^.]+)?)?\.weight",
    re.DOTALL,
)
"""Pattern for the name of a weight that replaces the base model's weight (`modules_to_save`)."""
_TOKENS = re.compile(
    r"base_model\.model\.(?P<path>(?:.+\.)?(?:embed_tokens|lm_head))"
    r"\.token_adapter\.trainable_tokens_delta(?:\.[^.]+)?",
    re.DOTALL,
)
"""Pattern for the name of the rows that replace the base model's rows for single tokens
(`trainable_token_indices`)."""

Factor = Literal["A", "B"]


class TensorNames(msgspec.Struct, frozen=True):
    """Names of an adapter's tensors by module and factor.

    - root: element of ROOTS with which all paths begin.
    - modules: names of the LoRA factors, by module path and factor.
    - copies: names of copies of base model weights, by module path.
    - tables: names of weights that replace whole weights of the base model, by module path.
    - tokens: names of rows that replace the base model's rows of single tokens, by module path.
    """

    root: str
    modules: dict[str, dict[Factor, str]]
    copies: dict[str, str]
    tables: dict[str, str]
    tokens: dict[str, str]


def read_names(names: Iterable[str]) -> TensorNames:
    """Returns the module and the factor of each tensor name.

    Raises AdapterRejected for a name that is unknown or belongs to an unsupported feature or
    format, and for names that contradict each other.
    """
    names = list(names)
    if not names:
        raise AdapterRejected("adapter.tensor.none", "adapter_model.safetensors", 0, "at least one")
    if any(name.endswith("_proj.weight") for name in names) and not any(
        "lora_" in name for name in names
    ):
        raise AdapterRejected("adapter.unsupported.full_checkpoint", names[0])
    modules: dict[str, dict[Factor, str]] = {}
    weights: dict[re.Pattern[str], dict[str, str]] = {_COPY: {}, _TABLE: {}, _TOKENS: {}}
    roots: dict[str, str] = {}
    adapters: dict[str | None, str] = {}
    for name in names:
        plain = _unwrap(name)
        weight = next(filter(None, (pattern.fullmatch(plain) for pattern in weights)), None)
        if weight is not None:
            path = weight["path"]
            if (other := weights[weight.re].setdefault(path, name)) != name:
                raise AdapterRejected("adapter.tensor.two_namings", name, other)
        else:
            path, factor, adapter = _parse(name)
            found = modules.setdefault(path, {})
            if factor in found:
                raise AdapterRejected("adapter.tensor.two_namings", name, found[factor])
            found[factor] = name
            _note(adapters, adapter, name, "adapter.tensor.several_adapters")
        if (root := _root(path)) is not None:
            _note(roots, root, name, "adapter.tensor.two_namings")
    if not modules:
        raise AdapterRejected("adapter.tensor.none", "adapter_model.safetensors", 0, "at least one")
    return TensorNames(next(iter(roots), ROOTS[0]), modules, *weights.values())


def _parse(name: str) -> tuple[str, Factor, str | None]:
    """Returns (module path, factor, adapter name or None) for a tensor name."""
    plain = _unwrap(name)
    match = _EMBEDDING.fullmatch(plain) or _NAME.fullmatch(plain)
    # The last part of a factor's name may be the name of an adapter, which may be any word.
    for part in (plain if match is None else match["path"]).split("."):
        if part in UNSUPPORTED_MODULES and (match or part != "base_layer"):
            raise AdapterRejected(f"adapter.unsupported.{UNSUPPORTED_MODULES[part]}", name)
    for pattern, feature in UNSUPPORTED if match is None else ():
        if re.search(pattern, plain):
            raise AdapterRejected(f"adapter.unsupported.{feature}", name)
    is_embedding = match is not None and match["path"].rpartition(".")[2] == "embed_tokens"
    if match is None or is_embedding != (match.re is _EMBEDDING):
        expected = [f"{PREFIX}...lora_{factor}.weight" for factor in "AB"]
        raise AdapterRejected("adapter.tensor.unbound", name, None, expected)
    path = match["path"]
    for doubled, single in DOUBLED:
        if path.startswith(doubled):
            meant = plain.replace(PREFIX + doubled, PREFIX + single, 1)
            raise AdapterRejected("adapter.tensor.doubled_prefix", name, name, meant)
    return path, "A" if match["factor"] == "A" else "B", match["adapter"]


def _unwrap(name: str) -> str:
    """Returns the name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _root(path: str) -> str | None:
    """Returns the element of ROOTS that the path begins with. Returns None if there is none, or if
    the path is neither in a decoder layer nor the embedding."""
    embedding = path.removesuffix("embed_tokens")
    root, separator, _ = (embedding, True, "") if embedding != path else path.partition("layers.")
    return root if separator and root in ROOTS else None


def _note(seen: dict[Any, str], value: object, name: str, code: str) -> None:
    """Records that `name` has the value. Raises AdapterRejected with `code` if an earlier name has
    another value. seen: the first name that has each value."""
    seen.setdefault(value, name)
    if len(seen) > 1:
        raise AdapterRejected(code, name, next(iter(seen.values())))
