"""Binding of an adapter's tensors to modules of a base model, with rank and scale. Torch-free.

The tensor names decide which modules an adapter changes, and the config must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from adapters.errors import AdapterRejected
from adapters.format.configuration import ZERO_INITS, LoRAConfig
from adapters.format.module_list import MODULES_NAME, ListedModule
from adapters.format.patterns import PatternMatcher
from adapters.format.tensor_headers import TensorEntry
from adapters.format.tensor_names import HEADS, PREFIX, ROOTS, Factor, TensorNames, read_names
from adapters.manifest import OUTER, BaseModelShape


class BoundModule(msgspec.Struct, frozen=True):
    """Module that an adapter changes. projection: index of the module in
    `BaseModelShape.modules(layer)`.

    a, b: header entries of the tensors A [rank, in] and B [out, rank], in the family's layout.
    first_row: row of B at which the projection's rows begin. scale: factor of the product B A.
    """

    layer: int
    projection: int
    rank: int
    scale: float
    a_name: str
    b_name: str
    a: TensorEntry
    b: TensorEntry
    first_row: int = 0


class BaseCopy(msgspec.Struct, frozen=True):
    """Copy of a base model weight in an adapter's file. module: name of the weight's module in
    OUTER. name: name of the tensor."""

    module: str
    name: str
    entry: TensorEntry


class BoundRows(msgspec.Struct, frozen=True):
    """Rows that replace rows of the embedding or of the output matrix, one for each token.

    module: index of the replaced matrix in OUTER. entry: header entry of the tensor [rows, hidden
    size]. tokens: token id of each row, in any order. If it is None, row n belongs to token n.
    """

    module: int
    name: str
    entry: TensorEntry
    tokens: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return self.entry.shape[0]


class BoundAdapter(msgspec.Struct, frozen=True):
    """Adapter whose tensors are bound to modules of a base model. modules: sorted by layer, then
    projection. rows: sorted by module. invocation_tokens: tokens that activate the adapter, if it
    is an activated LoRA (aLoRA)."""

    base: BaseModelShape
    modules: tuple[BoundModule, ...]
    rows: tuple[BoundRows, ...]
    warnings: tuple[str, ...]
    invocation_tokens: tuple[int, ...] = ()


def bind(
    config: LoRAConfig, tensors: dict[str, TensorEntry], base: BaseModelShape, max_rank: int
) -> BoundAdapter:
    """Binds each tensor to its module. Raises AdapterRejected if a tensor has no module, a module
    lacks a factor, or the config does not agree with the tensors."""
    _check_vocabulary(config.alora_invocation_tokens or (), base.vocab_size)
    names = read_names(tensors)
    sites = _sites(base, names.root)
    _check_modules(names, sites)
    matcher = PatternMatcher("target_modules")
    bound = [
        module
        for path in sites
        if path in names.modules
        for module in _bind_module(
            config, path, sites[path], names.modules[path], tensors, base, max_rank, matcher
        )
    ]
    modules = tuple(sorted(bound, key=lambda module: (module.layer, module.projection)))
    rows = bind_rows(config, tensors, base)
    _check_activation(config, modules, rows, base)
    missing = [
        path
        for path, (layer, _) in sites.items()
        if path not in names.modules
        and path not in names.tables
        and config.targets(path, _numbered(layer, base), matcher)
    ]
    warnings = _explain_missing(missing, config) + _explain_copies(names, sites, tensors, base)
    return BoundAdapter(base, modules, rows, warnings, config.alora_invocation_tokens or ())


def bind_listed(
    modules: Sequence[ListedModule], tensors: dict[str, TensorEntry], base: BaseModelShape
) -> tuple[BoundModule, ...]:
    """Binds the tensors of a stored adapter according to its list of modules, without matching
    patterns.

    Raises AdapterRejected if the list, the tensors and the base do not agree.
    """
    names = read_names(tensors)
    sites = _sites(base, names.root)
    _check_modules(names, sites)
    scales = {(module.layer, module.projection): module.scale for module in modules}
    touched = {
        (layer, base.modules(layer).index(projection)): path
        for path, (layer, projections) in sites.items()
        if path in names.modules
        for projection in projections
    }
    if scales.keys() != touched.keys():
        raise AdapterRejected(
            "adapter.store.modules", MODULES_NAME, len(scales), f"the {len(touched)} of the tensors"
        )
    bound: list[BoundModule] = []
    for path in dict.fromkeys(touched.values()):
        shape = tensors[names.modules[path]["A"]].shape
        rank = shape[0] if shape else 0
        bound += _bind_factors(sites[path], rank, scales, names.modules[path], tensors, base)
    return tuple(sorted(bound, key=lambda module: (module.layer, module.projection)))


def replaces_weights(tensors: dict[str, TensorEntry]) -> bool:
    """Whether tensors of the file replace weights of the base model. Raises AdapterRejected for
    names that `read_names` refuses."""
    names = read_names(tensors)
    return bool(names.tables or names.tokens)


def bind_rows(
    config: LoRAConfig, tensors: dict[str, TensorEntry], base: BaseModelShape
) -> tuple[BoundRows, ...]:
    """Binds the tensors that replace weights of the base model: whole weights, and rows of single
    tokens.

    As in peft, new rows of an embedding that is tied to the output matrix are rows of both, while a
    whole new embedding leaves the output matrix alone. Raises AdapterRejected if the weights do not
    agree with the configuration or do not fit the base.
    """
    names = read_names(tensors)
    if base.linears and (weights := names.tables | names.tokens):
        raise AdapterRejected("adapter.unsupported.replaced_weights", next(iter(weights.values())))
    sites = _sites(base, names.root)
    saved = _find_weights(names.tables, config.saved_modules, sites)
    tokens = config.trained_tokens
    if base.tie_word_embeddings and "embed_tokens" in tokens:
        tokens = {"lm_head": tokens["embed_tokens"]} | tokens
    tied = base.tie_word_embeddings and tokens.get("lm_head") == tokens.get("embed_tokens")
    trained = _find_weights(names.tokens, {*tokens}, sites, tied=tied)
    _check_changed_once(names, sites, saved, trained)
    rows: list[BoundRows] = []
    for module, name in enumerate(OUTER):
        if (found := saved.get(name) or trained.get(name)) is not None:
            ids = None if name in saved else tokens[name]
            _check_rows(found, tensors[found], ids, base)
            rows.append(BoundRows(module, found, tensors[found], ids))
    return tuple(rows)


def find_copies(tensors: dict[str, TensorEntry], base: BaseModelShape) -> tuple[BaseCopy, ...]:
    """Returns the copies of base model weights in the file. Raises AdapterRejected."""
    names = read_names(tensors)
    return _find_copies(names, _sites(base, names.root), tensors, base)


def bind_any(
    config: LoRAConfig,
    tensors: dict[str, TensorEntry],
    bases: Sequence[BaseModelShape],
    max_rank: int,
) -> BoundAdapter:
    """Binds the adapter to the only base that fits all tensors.

    Raises AdapterRejected with adapter.base.ambiguous if several bases fit. If none fits, raises
    the error of the bases if all have the same code and field, else adapter.base.mismatch.
    """
    bound: list[BoundAdapter] = []
    reasons: list[AdapterRejected] = []
    for base in {base.digest: base for base in bases}.values():
        try:
            bound.append(bind(config, tensors, base, max_rank))
        except AdapterRejected as error:
            reasons.append(error)
    if len(bound) == 1:
        return bound[0]
    if bound:
        raise AdapterRejected(
            "adapter.base.ambiguous", "model", None, [candidate.base.digest for candidate in bound]
        )
    if len({(reason.code, reason.field) for reason in reasons}) == 1:
        raise reasons[0]
    raise AdapterRejected(
        "adapter.base.mismatch",
        "model",
        [str(reason) for reason in reasons],
        hint="No registered base model takes every tensor: train on one that is registered.",
    )


@lru_cache(maxsize=16)
def _sites(base: BaseModelShape, root: str) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Returns (layer, projections) of each module that an adapter can change, by path, in the order
    of the layers.

    The paths begin with `root`, as in the model that was trained, because the config's patterns
    match such paths. lm_head is left out if the trained model has no output matrix.
    """
    return {
        trained: (layer, projections)
        for layer in range(base.num_layers + 1)
        for path, projections in base.trained_modules(layer).items()
        if (trained := _under(root, path)) is not None
    }


def _numbered(layer: int, base: BaseModelShape) -> int | None:
    """Returns the layer's number as patterns see it, or None for modules outside of the layers."""
    return None if layer == base.num_layers else layer


def _under(root: str, path: str) -> str | None:
    """Returns the module's path in the model that was trained, or None if that model has no such
    module."""
    if path == "lm_head":
        return HEADS.get(root)
    inner = path.removeprefix(ROOTS[0])
    return path if inner == path else root + inner


def _check_vocabulary(invocation_tokens: tuple[int, ...], vocab_size: int) -> None:
    for token in invocation_tokens:
        if not 0 <= token < vocab_size:
            raise AdapterRejected(
                "adapter.config.invocation_tokens",
                "alora_invocation_tokens",
                token,
                f"0 to {vocab_size - 1}",
                "The base model has no such token.",
            )


def _check_modules(names: TensorNames, sites: dict[str, tuple[int, tuple[str, ...]]]) -> None:
    """Raises AdapterRejected for a module that the base lacks, or that lacks one of its factors."""
    for path, factors in names.modules.items():
        name = next(iter(factors.values()))
        if path not in sites:
            raise AdapterRejected(
                "adapter.tensor.unbound",
                name,
                path,
                f"{PREFIX}{next(iter(sites))}.lora_A.weight, ... in {len(sites)} modules",
            )
        if "A" not in factors:
            raise AdapterRejected("adapter.tensor.missing", name.replace("lora_B", "lora_A"))
        if "B" not in factors:
            raise AdapterRejected("adapter.tensor.missing", name.replace("lora_A", "lora_B"))


def _bind_module(
    config: LoRAConfig,
    path: str,
    site: tuple[int, tuple[str, ...]],
    names: dict[Factor, str],
    tensors: dict[str, TensorEntry],
    base: BaseModelShape,
    max_rank: int,
    matcher: PatternMatcher,
) -> list[BoundModule]:
    layer, projections = site
    if not config.targets(path, _numbered(layer, base), matcher):
        raise AdapterRejected("adapter.tensor.not_targeted", names["A"], path)
    rank = config.rank(path, matcher)
    scale = config.scale(path, rank, matcher)
    names_of_layer = base.modules(layer)
    scales = {(layer, names_of_layer.index(projection)): scale for projection in projections}
    modules = _bind_factors(site, rank, scales, names, tensors, base)
    if rank > max_rank:
        raise AdapterRejected("adapter.rank.too_large", names["A"], rank, max_rank)
    return modules


def _bind_factors(
    site: tuple[int, tuple[str, ...]],
    rank: int,
    scales: dict[tuple[int, int], float],
    names: dict[Factor, str],
    tensors: dict[str, TensorEntry],
    base: BaseModelShape,
) -> list[BoundModule]:
    """Binds the projections of a module. Raises AdapterRejected if the factors have other shapes
    than the module requires.

    scales: factors of the product B A by (layer, projection).
    """
    layer, projections = site
    a_name, b_name = names["A"], names["B"]
    shapes = [base.projection_shape(layer, projection) for projection in projections]
    in_features, out_features = shapes[0][0], sum(rows for _, rows in shapes)
    a, b = tensors[a_name], tensors[b_name]
    _check_shape(a_name, a, (rank, in_features), rank_axis=0)
    _check_shape(b_name, b, (out_features, rank), rank_axis=1)
    modules: list[BoundModule] = []
    first_row = 0
    for projection, (_, num_rows) in zip(projections, shapes, strict=True):
        index = base.modules(layer).index(projection)
        scale = scales[layer, index]
        modules.append(
            BoundModule(layer, index, rank, scale, a_name, b_name, a, b, first_row=first_row)
        )
        first_row += num_rows
    return modules


def _check_shape(name: str, entry: TensorEntry, expected: tuple[int, int], rank_axis: int) -> None:
    if entry.shape == expected:
        return
    is_matrix = len(entry.shape) == 2
    if is_matrix and entry.shape[1 - rank_axis] == expected[1 - rank_axis]:
        raise AdapterRejected(
            "adapter.rank.mismatch", name, entry.shape[rank_axis], expected[rank_axis]
        )
    code = "adapter.base.mismatch" if is_matrix else "adapter.tensor.shape"
    raise AdapterRejected(code, name, list(entry.shape), list(expected))


def _find_weights(
    names: dict[str, str],
    wanted: set[str],
    sites: dict[str, tuple[int, tuple[str, ...]]],
    *,
    tied: bool = False,
) -> dict[str, str]:
    """Returns tensor names by the name of their module in OUTER.

    names: tensor names by module path. wanted: modules that the configuration names. tied: whether
    the output matrix uses the embedding's tensor if it has none of its own. Raises AdapterRejected
    unless each wanted module has a tensor and no other module has one.
    """
    found: dict[str, str] = {}
    for path, name in names.items():
        if path not in sites:
            raise AdapterRejected("adapter.tensor.unbound", name, path, [*sites][-len(OUTER) :])
        (module,) = sites[path][1]
        if module not in wanted:
            raise AdapterRejected("adapter.unsupported.full_embedding", name)
        found[module] = name
    if tied and "embed_tokens" in found:
        found.setdefault("lm_head", found["embed_tokens"])
    for module in wanted - found.keys():
        raise AdapterRejected("adapter.tensor.missing", module, None, "its weight")
    return found


def _check_changed_once(
    names: TensorNames,
    sites: dict[str, tuple[int, tuple[str, ...]]],
    saved: dict[str, str],
    trained: dict[str, str],
) -> None:
    """Raises AdapterRejected for a module that the adapter changes in two ways. As in peft, an
    output matrix may have both factors and replaced rows of single tokens."""
    adapted = {sites[path][1][0]: next(iter(each.values())) for path, each in names.modules.items()}
    factors = {module: adapted[module] for module in OUTER if module in adapted}
    embedding = {module: name for module, name in trained.items() if module == "embed_tokens"}
    for one, other in ((saved, trained), (saved, factors), (embedding, factors)):
        for module in one.keys() & other.keys():
            raise AdapterRejected(
                "adapter.unsupported.changed_twice", module, [one[module], other[module]]
            )


def _check_rows(
    name: str, entry: TensorEntry, tokens: tuple[int, ...] | None, base: BaseModelShape
) -> None:
    """Raises AdapterRejected unless there is one row for each token. If `tokens` is None, there
    must be one for each token of the vocabulary."""
    for token in tokens or ():
        if not 0 <= token < base.vocab_size:
            field, allowed = "trainable_token_indices", f"0 to {base.vocab_size - 1}"
            raise AdapterRejected("adapter.config.token_indices", field, token, allowed)
    num_rows = base.vocab_size if tokens is None else len(tokens)
    if len(entry.shape) != 2 or entry.shape[1] != base.hidden_size:
        got, allowed = list(entry.shape), [num_rows, base.hidden_size]
        raise AdapterRejected("adapter.base.mismatch", name, got, allowed)
    if entry.shape[0] != num_rows and tokens is None:
        raise AdapterRejected(
            "adapter.unsupported.resized_vocabulary",
            name,
            entry.shape[0],
            num_rows,
            f"The saved weight has {entry.shape[0]} rows and the base model's vocabulary has"
            f" {num_rows}: train without resize_token_embeddings, with tokens that the base model"
            " has.",
        )
    if entry.shape[0] != num_rows:
        raise AdapterRejected("adapter.tensor.shape", name, entry.shape[0], num_rows)


def _explain_missing(missing: list[str], config: LoRAConfig) -> tuple[str, ...]:
    """Returns a warning about targeted modules without tensors. Raises AdapterRejected if peft
    would initialise such modules (see `init_lora_weights`) with values that have an effect."""
    if not missing:
        return ()
    if config.init_lora_weights not in ZERO_INITS:
        raise AdapterRejected("adapter.tensor.missing", missing[0], None, "lora_A and lora_B")
    return (f"{len(missing)} targeted modules have no tensors and stay as in the base",)


def _check_activation(
    config: LoRAConfig,
    modules: tuple[BoundModule, ...],
    rows: tuple[BoundRows, ...],
    base: BaseModelShape,
) -> None:
    """Raises AdapterRejected if an activated LoRA changes the embedding, which peft refuses as
    well, or replaces weights, which peft does for all tokens of a prompt."""
    touched = [m.a_name for m in modules if base.modules(m.layer)[m.projection] == "embed_tokens"]
    if config.alora_invocation_tokens and (names := touched + [each.name for each in rows]):
        raise AdapterRejected("adapter.unsupported.activated_embedding", names[0])


def _find_copies(
    names: TensorNames,
    sites: dict[str, tuple[int, tuple[str, ...]]],
    tensors: dict[str, TensorEntry],
    base: BaseModelShape,
) -> tuple[BaseCopy, ...]:
    copies: list[BaseCopy] = []
    for path, name in names.copies.items():
        if path not in names.modules or path not in sites:
            raise AdapterRejected("adapter.unsupported.base_weights", name)
        expected = (base.vocab_size, base.hidden_size)
        if tensors[name].shape != expected:
            got, allowed = list(tensors[name].shape), list(expected)
            raise AdapterRejected("adapter.base.mismatch", name, got, allowed)
        copies.append(BaseCopy(sites[path][1][0], name, tensors[name]))
    return tuple(copies)


def _explain_copies(
    names: TensorNames,
    sites: dict[str, tuple[int, tuple[str, ...]]],
    tensors: dict[str, TensorEntry],
    base: BaseModelShape,
) -> tuple[str, ...]:
    return tuple(
        f"the file repeats the base model's {copy.module} ({copy.name}): it is not used, and the"
        " proof compares it with the base's (save_embedding_layers=False leaves it out)"
        for copy in _find_copies(names, sites, tensors, base)
    )
