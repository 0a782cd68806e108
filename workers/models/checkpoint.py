"""Reads the weights of a canonical folder, and checks them against the spec of its model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from safetensors import SafetensorError, safe_open

from ops.weight_format import BLOCK_SIZES, WeightFormat
from workers.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ops.block_matrix import Weight

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
BLOCK_FORMATS = {format.name for format in BLOCK_SIZES}
"""Suffixes of the names under which matrices in block formats are stored as uint8 tensors."""
BACKBONE = "model."
"""Prefix of the canonical names of all tensors except the output matrix."""
ROOTS = ("model.language_model.", "language_model.model.", "language_model.", BACKBONE)
"""Prefixes that tensor names in checkpoints may have where canonical names have `model.`. In
checkpoints that transformers' AutoModel saved, the names have no prefix."""


class CheckpointError(ValueError):
    """Error raised if the weights cannot be read, or do not match config.json."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: the single file, or the shards in the folder's
    index."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(f"neither {SINGLE_FILE} nor {INDEX_FILE} in {folder}")
    try:
        names = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{INDEX_FILE} has no weight_map of names to files") from error
    for name in names:
        if (
            not isinstance(name, str)
            or "/" in name
            or "\\" in name
            or not name.endswith(".safetensors")
        ):
            raise CheckpointError(f"{INDEX_FILE} names {name!r}, which is no shard beside it")
        if not (folder / name).is_file():
            raise CheckpointError(f"shard {name} is missing")
    return [folder / name for name in sorted(names)]


def expected_tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and the shape of every tensor of the model. The names are the same as in
    transformers."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.q_width, spec.kv_width
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    norms = ["post_attention_layernorm"]
    if spec.pre_norms:
        norms = ["input_layernorm", *norms]
    if spec.pre_norms and spec.post_norms:
        norms.append("pre_feedforward_layernorm")
    if spec.post_norms:
        norms.append("post_feedforward_layernorm")
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        for norm in norms:
            yield f"{prefix}.{norm}.weight", (hidden,)
        for projection, width in (("q", q), ("k", kv), ("v", kv)):
            yield f"{prefix}.self_attn.{projection}_proj.weight", (width, hidden)
            if spec.qkv_bias:
                yield f"{prefix}.self_attn.{projection}_proj.bias", (width,)
        if spec.qk_norm or spec.wide_qk_norm:
            for name, width in (("q", q), ("k", kv)):
                size = width if spec.wide_qk_norm else spec.head_dim
                yield f"{prefix}.self_attn.{name}_norm.weight", (size,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not spec.tie_word_embeddings:
        yield "lm_head.weight", (spec.vocab_size, hidden)


class Checkpoint:
    """Open weight files of a model. Tensors are memory-mapped views of the files."""

    def __init__(self, folder: Path, framework: Literal["pt", "np"] = "pt") -> None:
        """framework: "pt" reads torch tensors; "np" suffices for checks and does not load torch."""
        self._stack = ExitStack()
        self._stored: dict[str, tuple[Any, str]] = {}
        """Open file of each tensor and the tensor's name in this file, by canonical name."""
        self.formats: dict[str, WeightFormat] = {}
        """Format of each tensor that is stored in blocks (see `ops.block_matrix`), by canonical
        name."""
        for path in weight_files(folder):
            try:
                handle = self._stack.enter_context(safe_open(path, framework=framework))
            except SafetensorError as error:
                raise CheckpointError(f"{path.name}: {error}") from error
            for stored in [*handle.keys()]:
                name = canonical_name(stored)
                if name in self._stored:
                    raise CheckpointError(f"{self._stored[name][1]} and {stored} are one tensor")
                self._stored[name] = handle, stored
                matrix, _, suffix = name.rpartition(".")
                if suffix in BLOCK_FORMATS:
                    self.formats[matrix] = WeightFormat[suffix]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stored.clear()
        self._stack.close()

    def get(self, name: str) -> Weight:
        """Returns a tensor as a view of the mapped file. The view is valid while the checkpoint is
        open."""
        if (format := self.formats.get(name)) is not None:
            from ops.block_matrix import BlockMatrix

            return BlockMatrix(format, self._read(f"{name}.{format.name}"))
        return self._read(name)

    def names(self) -> dict[str, str]:
        """Returns the stored name of every tensor, by canonical name."""
        return {name: stored for name, (_, stored) in self._stored.items()}

    def check(self, spec: ModelSpec) -> None:
        """Raises CheckpointError if a tensor of the spec is missing or has a wrong shape or type,
        or for a tensor outside the spec. Rotary frequencies and `lm_head.weight` are allowed, which
        an import keeps only if it equals the embedding."""
        expected = dict(expected_tensors(spec))
        stray = {*self._stored.keys() - expected.keys()}
        for name, shape in expected.items():
            dtypes = DTYPES
            if (format := self.formats.get(name)) is not None:
                name, shape = f"{name}.{format.name}", _block_shape(name, shape, format)
                dtypes = ("U8",)
                stray.remove(name)
            if name not in self._stored:
                raise CheckpointError(explain_missing(name))
            handle, stored = self._stored[name]
            view = handle.get_slice(stored)
            if (got := tuple(view.get_shape())) != shape:
                raise CheckpointError(f"tensor {name} has shape {got}, config.json says {shape}")
            if (dtype := view.get_dtype()) not in dtypes:
                raise CheckpointError(f"tensor {name} is {dtype}; allowed: {', '.join(dtypes)}")
        for name in stray:
            if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                raise CheckpointError(
                    f"tensor {self._stored[name][1]} belongs to no module of {spec.model_type}"
                )

    def _read(self, name: str) -> Tensor:
        if name not in self._stored:
            raise CheckpointError(f"tensor {name} is missing")
        handle, stored = self._stored[name]
        return handle.get_tensor(stored)


def explain_missing(name: str) -> str:
    hint = ""
    if name == "lm_head.weight":
        hint = (
            ", and config.json has tie_word_embeddings false: save the model with its output matrix"
            ", or set tie_word_embeddings to true if the matrix is tied to the embedding"
        )
    return f"tensor {name} is missing{hint}"


def canonical_name(stored: str) -> str:
    """Returns the canonical name of a stored tensor, which is the tensor's name in a checkpoint
    that has only a language model."""
    for root in ROOTS:
        if stored.startswith(root):
            stored = stored.removeprefix(root)
            break
    return stored if stored.startswith("lm_head.") else BACKBONE + stored


def _block_shape(name: str, shape: tuple[int, ...], format: WeightFormat) -> tuple[int, ...]:
    """Returns the shape [N, bytes per row] that a matrix [N, K] has when it is stored in blocks."""
    sizes = BLOCK_SIZES[format]
    if len(shape) != 2 or shape[1] % sizes.block:
        raise CheckpointError(f"tensor {name} of shape {shape} cannot be in {format.name} blocks")
    return shape[0], shape[1] // sizes.block * sizes.block_bytes
