"""Binds an adapter's tensors to modules of a base model, with rank and scale. Torch-free.

The tensor names decide which modules an adapter changes, and the config must agree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate

import msgspec

from adapters.errors import AdapterRejected
from adapters.format.configuration import ZERO_INITS, LoRAConfig
from adapters.format.module_list import MODULES_NAME, ListedModule
from adapters.format.patterns import PatternMatcher
from adapters.format.tensor_headers import TensorEntry
from adapters.format.tensor_names import HEADS, PREFIX, ROOTS, read_names
from adapters.manifest import OUTER, BaseModelShape


class BoundModule(msgspec.Struct, frozen=True):
    """Module that an adapter changes.

    - projection: index of the module in `BaseModelShape.modules(layer)`.
    - scale: factor of the product B A.
    - a, b: header entries of the tensors A [rank, in] and B [out, rank], in the family's layout.
    - first_row: row of B at which the projection's rows begin.
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
    """Copy of a base model weight in an adapter's file. module: name of the module that has
    the weight, an element of `adapters.manifest.OUTER`. name: name of the tensor."""

    module: str
    name: str
    entry: TensorEntry


class BoundRows(msgspec.Struct, frozen=True):
    """Rows that replace rows of the embedding or of the output matrix, one for each token.

    module: index of the replaced matrix in `adapters.manifest.OUTER`. entry: header entry of the
    tensor [rows, hidden size]. tokens: token id of each row, in any order. If `tokens` is None, row
    n belongs to token n.
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


class AdapterTensors:
    """Tensors of an adapter's file, which belong to modules of a base model.

    Each method raises AdapterRejected if the tensors, the base and the method's argument do not
    agree.
    """

    def __init__(self, entries: dict[str, TensorEntry], base: BaseModelShape) -> None:
        """entries: header entries by tensor name. Raises AdapterRejected for names that
        `read_names` refuses."""
        self._entries = entries
        self._base = base
        self._names = read_names(entries)
        self._sites = _sites(base, self._names.root)

    @property
    def replaces_weights(self) -> bool:
        """Whether any tensor replaces weights of the base model."""
        return bool(self._names.tables or self._names.tokens)

    def bind(self, config: LoRAConfig, max_rank: int) -> BoundAdapter:
        """Binds each tensor to its module. A module with only one of A and B is refused."""
        self._check_modules()
        matcher = PatternMatcher("target_modules")
        names, targets = self._names, partial(self._is_targeted, config, matcher)
        bound: list[BoundModule] = []
        for path in self._adapted_paths():
            a_name = names.modules[path]["A"]
            if config.has_parameter(path):
                got = list(config.target_parameters or ())
                raise AdapterRejected("adapter.unsupported.target_parameters", a_name, got)
            if not targets(path):
                hint = self._explain_not_targeted(config)
                raise AdapterRejected("adapter.tensor.not_targeted", a_name, path, hint=hint)
            rank = config.rank(path, matcher)
            scale = config.scale(path, rank, matcher)
            bound += self._bind_factors(path, rank, dict.fromkeys(self._sites_of(path), scale))
            if rank > max_rank:
                raise AdapterRejected("adapter.rank.too_large", a_name, rank, max_rank)
        modules, rows = _sorted(bound), self.bind_rows(config)
        invocation_tokens = config.alora_invocation_tokens or ()
        if invocation_tokens:
            self._check_activation(modules, rows)
        missing = [
            path
            for path in self._sites
            if path not in names.modules and path not in names.tables and targets(path)
        ]
        warnings = (
            *_explain_missing(missing, config),
            *_explain_parameters(config),
            *map(_explain_copy, self.copies()),
        )
        return BoundAdapter(self._base, modules, rows, warnings, invocation_tokens)

    def bind_listed(self, modules: Sequence[ListedModule]) -> tuple[BoundModule, ...]:
        """Binds the factors to the modules in the adapter's stored list. No patterns of the
        configuration are matched."""
        self._check_modules()
        scales = {(module.layer, module.projection): module.scale for module in modules}
        paths = self._adapted_paths()
        touched = {site for path in paths for site in self._sites_of(path)}
        if scales.keys() != touched:
            allowed = f"the {len(touched)} of the tensors"
            raise AdapterRejected("adapter.store.modules", MODULES_NAME, len(scales), allowed)
        bound: list[BoundModule] = []
        for path in paths:
            shape = self._entries[self._names.modules[path]["A"]].shape
            rank = shape[0] if shape else 0
            bound += self._bind_factors(path, rank, scales)
        return _sorted(bound)

    def bind_rows(self, config: LoRAConfig) -> tuple[BoundRows, ...]:
        """Binds the tensors that replace whole weights of the base model or rows of single tokens.

        As in peft, if the embedding is tied to the output matrix, new rows of the embedding replace
        rows of both. A whole new embedding does not change the output matrix.
        """
        names, base = self._names, self._base
        if base.linears and (weights := names.tables | names.tokens):
            name = next(iter(weights.values()))
            raise AdapterRejected("adapter.unsupported.replaced_weights", name)
        saved_modules = config.saved_modules
        if saved_modules and self._are_tied(config):
            saved_modules = {*OUTER}
        saved = self._find_weights(names.tables, saved_modules)
        tokens = config.trained_tokens
        if base.tie_word_embeddings and "embed_tokens" in tokens:
            tokens = {"lm_head": tokens["embed_tokens"]} | tokens
        tied = base.tie_word_embeddings and tokens.get("lm_head") == tokens.get("embed_tokens")
        trained = self._find_weights(names.tokens, {*tokens}, tied=tied)
        self._check_changed_once(saved, trained)
        rows: list[BoundRows] = []
        for module, name in enumerate(OUTER):
            if (found := saved.get(name) or trained.get(name)) is not None:
                ids = None if name in saved else tokens[name]
                _check_rows(found, self._entries[found], ids, base)
                rows.append(BoundRows(module, found, self._entries[found], ids))
        return tuple(rows)

    def copies(self) -> tuple[BaseCopy, ...]:
        """Returns the copies of base model weights that the file contains."""
        copies: list[BaseCopy] = []
        for path, name in self._names.copies.items():
            if path not in self._names.modules or path not in self._sites:
                raise AdapterRejected("adapter.unsupported.base_weights", name)
            entry, expected = self._entries[name], (self._base.vocab_size, self._base.hidden_size)
            if entry.shape != expected:
                got, allowed = list(entry.shape), list(expected)
                raise AdapterRejected("adapter.base.mismatch", name, got, allowed)
            copies.append(BaseCopy(self._sites[path][1][0], name, entry))
        return tuple(copies)

    def _adapted_paths(self) -> list[str]:
        """Returns the paths of the modules that have factors, in the order of the layers."""
        return [path for path in self._sites if path in self._names.modules]

    def _is_targeted(self, config: LoRAConfig, matcher: PatternMatcher, path: str) -> bool:
        layer = self._sites[path][0]
        if layer < self._base.num_layers:
            return config.targets(path, layer, matcher)
        paths = [path]
        if self._are_tied(config) and not self._base.linears:
            paths = [outer for outer, (at, _) in self._sites.items() if at == layer]
        return any(config.targets(each, None, matcher) for each in paths)

    def _are_tied(self, config: LoRAConfig) -> bool:
        """Returns whether the embedding and the output matrix are changed together."""
        return bool(config.ensure_weight_tying) and self._base.tie_word_embeddings

    def _explain_not_targeted(self, config: LoRAConfig) -> str:
        """Returns a hint for a file that has factors only of modules of the base, of which the
        configuration names only a part. Tinker writes such files: it trains the output matrix, and
        `all-linear` does not name it."""
        modules = sorted({path.rpartition(".")[2] for path in self._adapted_paths()})
        return (
            "adapter_config.json excludes this module: upload the two files of one run. If the"
            " factors of all modules in the file were trained together (Tinker trains lm_head under"
            f' all-linear), write "target_modules": {json.dumps(modules)} into adapter_config.json.'
        )

    def _sites_of(self, path: str) -> list[tuple[int, int]]:
        """Returns (layer, index) for each projection of the module. The index is the projection's
        position in `BaseModelShape.modules(layer)`."""
        layer, projections = self._sites[path]
        modules = self._base.modules(layer)
        return [(layer, modules.index(projection)) for projection in projections]

    def _check_modules(self) -> None:
        """Raises AdapterRejected if a module with factors is not in the base, or has only one."""
        for path, factors in self._names.modules.items():
            name = next(iter(factors.values()))
            if path not in self._sites:
                first = f"{PREFIX}{next(iter(self._sites))}.lora_A.weight"
                allowed = f"{first}, ... in {len(self._sites)} modules"
                raise AdapterRejected("adapter.tensor.unbound", name, path, allowed)
            if "A" not in factors:
                raise AdapterRejected("adapter.tensor.missing", name.replace("lora_B", "lora_A"))
            if "B" not in factors:
                raise AdapterRejected("adapter.tensor.missing", name.replace("lora_A", "lora_B"))

    def _bind_factors(
        self, path: str, rank: int, scales: dict[tuple[int, int], float]
    ) -> list[BoundModule]:
        """Binds the projections of a module. Raises AdapterRejected if the factors do not have the
        shapes that the module requires. scales: factors of the product B A by (layer, projection).
        """
        layer, projections = self._sites[path]
        a_name, b_name = (self._names.modules[path][factor] for factor in ("A", "B"))
        shapes = [self._base.projection_shape(layer, projection) for projection in projections]
        in_features, out_features = shapes[0][0], sum(rows for _, rows in shapes)
        a, b = self._entries[a_name], self._entries[b_name]
        _check_shape(a_name, a, (rank, in_features), rank_axis=0)
        _check_shape(b_name, b, (out_features, rank), rank_axis=1)
        first_rows = accumulate((rows for _, rows in shapes), initial=0)
        return [
            BoundModule(*site, rank, scales[site], a_name, b_name, a, b, first_row)
            for site, first_row in zip(self._sites_of(path), first_rows, strict=False)
        ]

    def _find_weights(
        self, names: dict[str, str], wanted: set[str], *, tied: bool = False
    ) -> dict[str, str]:
        """Returns tensor names by module name (element of `adapters.manifest.OUTER`).

        names: tensor names by module path. wanted: modules that the configuration names. Each of
        them must have a tensor, and no other module may have one. tied: whether the embedding's
        tensor is also used for an output matrix that has no tensor of its own.
        """
        found: dict[str, str] = {}
        for path, name in names.items():
            if path not in self._sites:
                allowed = [*self._sites][-len(OUTER) :]
                raise AdapterRejected("adapter.tensor.unbound", name, path, allowed)
            (module,) = self._sites[path][1]
            if module not in wanted:
                raise AdapterRejected("adapter.unsupported.full_embedding", name)
            found[module] = name
        if tied and "embed_tokens" in found:
            found.setdefault("lm_head", found["embed_tokens"])
        for module in wanted - found.keys():
            raise AdapterRejected("adapter.tensor.missing", module, None, "its weight")
        return found

    def _check_changed_once(self, saved: dict[str, str], trained: dict[str, str]) -> None:
        """Raises AdapterRejected for a module that the adapter changes in two ways. As in peft, an
        output matrix may have both factors and replaced rows of single tokens."""
        modules = self._names.modules.items()
        adapted = {self._sites[path][1][0]: next(iter(each.values())) for path, each in modules}
        factors = {module: adapted[module] for module in OUTER if module in adapted}
        embedding = {module: name for module, name in trained.items() if module == "embed_tokens"}
        for one, other in ((saved, trained), (saved, factors), (embedding, factors)):
            for module in one.keys() & other.keys():
                both = [one[module], other[module]]
                raise AdapterRejected("adapter.unsupported.changed_twice", module, both)

    def _check_activation(
        self, modules: tuple[BoundModule, ...], rows: tuple[BoundRows, ...]
    ) -> None:
        """Raises AdapterRejected if an activated LoRA changes the embedding or replaces weights.
        peft refuses a changed embedding, and uses replaced weights for all tokens of a prompt,
        including the tokens before the activation."""
        kinds = {m.a_name: self._base.modules(m.layer)[m.projection] for m in modules}
        touched = [name for name, kind in kinds.items() if kind == "embed_tokens"]
        if names := touched + [each.name for each in rows]:
            raise AdapterRejected("adapter.unsupported.activated_embedding", names[0])


def bind_any(
    config: LoRAConfig,
    tensors: dict[str, TensorEntry],
    bases: Sequence[BaseModelShape],
    max_rank: int,
) -> BoundAdapter:
    """Binds the adapter to the only base that fits all tensors.

    Raises AdapterRejected with adapter.base.ambiguous if several bases fit, and with
    adapter.base.mismatch if none fits. If none fits and the errors of all bases have the same code
    and field, raises the first of these errors instead.
    """
    bound: list[BoundAdapter] = []
    reasons: list[AdapterRejected] = []
    for base in {base.digest: base for base in bases}.values():
        try:
            _check_vocabulary(config.alora_invocation_tokens or (), base.vocab_size)
            bound.append(AdapterTensors(tensors, base).bind(config, max_rank))
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
    """Returns (layer, projections) of each module that an adapter can change, by the module's path
    and in the order of the layers.

    The paths begin with `root`, as in the model that was trained, because the config's patterns
    match such paths. lm_head is left out if the trained model has no output matrix.
    """
    return {
        trained: (layer, projections)
        for layer in range(base.num_layers + 1)
        for path, projections in base.trained_modules(layer).items()
        if (trained := _under(root, path)) is not None
    }


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


def _check_rows(
    name: str, entry: TensorEntry, tokens: tuple[int, ...] | None, base: BaseModelShape
) -> None:
    """Raises AdapterRejected unless the tensor has one row for each token in `tokens`, or, if
    `tokens` is None, for each token of the vocabulary."""
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


def _explain_parameters(config: LoRAConfig) -> tuple[str, ...]:
    """Returns a warning about `target_parameters`, of which the file has no factors."""
    names = config.target_parameters or ()
    if not names:
        return ()
    if config.init_lora_weights not in ZERO_INITS:
        raise AdapterRejected("adapter.tensor.missing", names[0], None, "lora_A and lora_B")
    shown = ", ".join(name[:64] for name in names[:8])
    return (f"no factors of target_parameters are in the file ({shown}): they stay as in the base",)


def _explain_copy(copy: BaseCopy) -> str:
    return (
        f"the file repeats the base model's {copy.module} ({copy.name}): it is not used, and the"
        " proof compares it with the base's (save_embedding_layers=False leaves it out)"
    )


def _sorted(modules: list[BoundModule]) -> tuple[BoundModule, ...]:
    return tuple(sorted(modules, key=lambda module: (module.layer, module.projection)))
