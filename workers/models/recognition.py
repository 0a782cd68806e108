"""Finds modules of a transformers model that compute what our ops compute.

A module is recognised by its results. A copy of the module, with random weights and with stand-ins
for its linears and blocks, is run on random inputs, and each intermediate result must equal that of
our ops within rounding. Stand-ins return random numbers, so the check needs no large weight. A
module that differs, or whose code raises an error, is left to transformers.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from adapters.manifest import ModelLinear
from ops.base import Activation
from ops.reference import ReferenceOps
from workers.models.transformers_spec import AttentionSite, TransformersSpec

log = logging.getLogger(__name__)

NUM_ROWS = 8
"""Number of rows of random inputs."""
MAX_POSITIONS = 1 << 14
"""Maximum number of positions whose cosines and sines are computed at once."""
ROPE = "position_embeddings"
"""Name of the argument in which transformers' layers receive cosines and sines."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FoundNorm:
    """RMS norm. offset: number that is added to every stored weight."""

    path: str
    size: int
    offset: float
    eps: float


@dataclass(frozen=True, slots=True)
class FoundMLP:
    """Gated MLP: down(activation(gate(x)) * up(x))."""

    gate: ModelLinear
    up: ModelLinear
    down: ModelLinear
    activation: Activation


@dataclass(frozen=True, slots=True)
class FoundAttention:
    """Attention of one module. norms: norms of each head of q and of k before the rotation, if any.
    rope: index of the rotary table in `Recognised.ropes`. scale, softcap: see `LayerAttention`."""

    q: ModelLinear
    k: ModelLinear
    v: ModelLinear
    output: ModelLinear
    norms: tuple[FoundNorm, FoundNorm] | None
    rope: int
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """Decoder layer that adds its attention and then its MLP to the residual, with optional norms
    before and after both."""

    attention: FoundAttention
    mlp: FoundMLP
    attention_norm: FoundNorm | None
    post_attention_norm: FoundNorm | None
    mlp_norm: FoundNorm | None
    post_mlp_norm: FoundNorm | None


@dataclass(frozen=True, slots=True)
class FoundLayers:
    """All layers of a model, and the norm after them. path: path of the list of layers."""

    path: str
    layers: list[FoundLayer]
    final_norm: FoundNorm


@dataclass(slots=True)
class Recognised:
    """Recognised modules of a model by path. ropes: rotary tables, float32 [positions, D], on the
    host. layers: None if a layer, or the order of layers, is not recognised."""

    norms: dict[str, FoundNorm] = field(default_factory=dict[str, FoundNorm])
    mlps: dict[str, FoundMLP] = field(default_factory=dict[str, FoundMLP])
    attentions: dict[str, FoundAttention] = field(default_factory=dict[str, FoundAttention])
    ropes: list[Tensor] = field(default_factory=list[Tensor])
    layers: FoundLayers | None = None

    def describe(self) -> str:
        """Returns in words which modules our ops compute instead of transformers' code."""
        if self.layers is not None:
            return f"all {len(self.layers.layers)} layers, as those of a native family"
        found = {"norms": self.norms, "gated MLPs": self.mlps, "attention modules": self.attentions}
        counts = [f"{len(modules)} {kind}" for kind, modules in found.items() if modules]
        return ", ".join((*counts, "linears"))


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a stand-in. x: its first argument. args, kwargs: its other arguments. y: its
    result."""

    name: str
    x: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    y: Tensor


class StandIn(nn.Module):
    """Replacement for a child of a module. It records its calls and returns random numbers of the
    input's shape, except that the last dimension is `width` if it is given."""

    def __init__(
        self, name: str, calls: list[Call], width: int = 0, *, is_attention: bool = False
    ) -> None:
        super().__init__()
        self._name, self._calls, self._width = name, calls, width
        self._is_attention = is_attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x: Tensor = args[0] if args else kwargs.pop("hidden_states")
        y = _random(*x.shape[:-1], self._width or x.shape[-1])
        self._calls.append(Call(self._name, x.clone(), args[1:], kwargs, y.clone()))
        return (y, None) if self._is_attention else y


class StandInTable(nn.Module):
    """Replacement for an embedding. It returns one random number for each token."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.randn(*ids.shape, 1)


class StandInPages:
    """Replacement for `PagedAttention`. It stores its arguments and returns random numbers."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        self.query, self.key, self.value = (part[0].transpose(0, 1) for part in (query, key, value))
        self.scale, self.softcap, self.sinks = scale, softcap, sinks
        self.y = _random(1, query.shape[2], query.shape[1], value.shape[3])
        return self.y.clone()


@torch.inference_mode()
def recognise(
    model: nn.Module,
    backbone: nn.Module,
    spec: TransformersSpec,
    read: Callable[[str], Tensor],
    num_positions: int,
) -> Recognised:
    """Returns the recognised modules of a model.

    model: modules on the meta device. backbone: the part of the model that computes hidden states.
    read: function that returns a stored tensor on the host, by its name in the model.
    num_positions: number of rows of rotary tables.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not those of devices, whose state is not restored
        blocks = _Blocks(model, spec)
        layers = _attempt(lambda: _Layers(blocks, backbone, read, num_positions))
        blocks.found.layers = layers and _attempt(layers.find)
    return blocks.found


class _Blocks:
    """Recogniser of norms, MLPs and attention modules."""

    def __init__(self, model: nn.Module, spec: TransformersSpec) -> None:
        self.found = Recognised()
        self.model = model
        self.spec = spec
        self._ops = ReferenceOps()
        self._linears = {linear.path: linear for linear in spec.recorded.shape.linears}
        self._twins: dict[str, tuple[nn.Module, Tensor]] = {}
        """Copy of each recognised norm, and its random weight with the offset, by path."""
        for path, module in model.named_modules():
            if (norm := _attempt(lambda p=path, m=module: self._norm(p, m))) is not None:
                self.found.norms[path] = norm
            if (mlp := _attempt(lambda p=path, m=module: self._mlp(p, m))) is not None:
                self.found.mlps[path] = mlp

    def attention(
        self, site: AttentionSite, call: Call, find_rope: Callable[[Tensor], int | None]
    ) -> FoundAttention | None:
        """Returns the attention module if it is recognised. call: call of its stand-in. find_rope:
        function that returns the index of the rotary table with the angles [T, D] of the call."""
        module, dim = self.model.get_submodule(site.module), site.head_dim
        linears = self._linears_in(site.module, module)
        names = ("q_proj", "k_proj", "v_proj")
        if len(linears) != 4 or not {*names} < {*linears} or _has_tensors(module):
            return None
        if not dim == site.value_dim == site.padded_dim or not _are_fusible(module, names):
            return None
        children = [name for name, _ in module.named_children()]
        paths = [f"{site.module}.{name}" for name in children]
        norms = [path for path in paths if path in self.found.norms]
        twins = {path.rpartition(".")[2]: self._twins[path][0] for path in norms}
        calls: list[Call] = []
        twin = _with(module, _stand_ins(linears, calls) | twins)
        twin.paged_attention = pages = StandInPages()  # pyright: ignore
        x = _random(*call.x.shape)
        result = twin(x, *call.args, **call.kwargs)
        by_name = {each.name: each for each in calls}
        if len(calls) != 4 or by_name.keys() != linears.keys() or pages.sinks is not None:
            return None
        q, k, v = (by_name.pop(name) for name in names)
        (output,) = by_name.values()
        is_pair = isinstance(result, tuple) and len(result) == 2 and result[1] is None
        if not is_pair or not all(_close(each.x, x) for each in (q, k, v)):
            return None
        if not _close(output.x, pages.y.flatten(2)) or not _close(result[0], output.y):
            return None
        heads = [each.y[0].unflatten(1, (-1, dim)) for each in (q, k, v)]
        if norms:
            q_norm, k_norm = sorted(norms, key=lambda path: not path.split(".")[-1].startswith("q"))
            for index, path in enumerate((q_norm, k_norm)):
                norm, weight = self.found.norms[path], self._twins[path][1]
                heads[index] = self._ops.rms_norm(heads[index], weight, norm.eps)
            norms = [q_norm, k_norm]
            if len({self.found.norms[path].eps for path in norms}) > 1:
                return None
        if not _close(heads[2], pages.value):
            return None
        candidates = [_unrotated(NUM_ROWS, dim)]
        if ROPE in call.kwargs:
            candidates.append(_angles(call.kwargs[ROPE], dim))
        for angles in candidates:
            turned = [_rotate(part, angles) for part in heads[:2]]
            if not (_close(turned[0], pages.query) and _close(turned[1], pages.key)):
                continue
            if (rope := find_rope(angles)) is None:
                return None
            found_norms = tuple(self.found.norms[path] for path in norms)
            scale = dim**-0.5 if pages.scale is None else pages.scale
            pair = (found_norms[0], found_norms[1]) if found_norms else None
            own = [linears[each.name] for each in (q, k, v, output)]
            return FoundAttention(*own, pair, rope, scale, pages.softcap)  # pyright: ignore
        return None

    def _norm(self, path: str, module: nn.Module) -> FoundNorm | None:
        stored = module._parameters.get("weight")
        if stored is None or stored.ndim != 1 or len(module._parameters) != 1:
            return None
        if module._modules or module._buffers or not _takes_one_argument(module):
            return None
        weight = torch.randn(len(stored))
        twin = _with(module, {})
        twin._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
        # Small rows show the epsilon, and an average other than zero shows that none is subtracted.
        sizes = torch.logspace(-4, 1, NUM_ROWS).unsqueeze(1)
        x = (torch.randn(NUM_ROWS, len(stored)) + 0.3) * sizes
        y = twin(x)
        for eps in (value for value in vars(module).values() if isinstance(value, float)):
            for offset in (0.0, 1.0):
                if _close(y, self._ops.rms_norm(x, weight + offset, eps)):
                    self._twins[path] = twin, weight + offset
                    return FoundNorm(path, len(stored), offset, eps)
        return None

    def _mlp(self, path: str, module: nn.Module) -> FoundMLP | None:
        linears = self._linears_in(path, module)
        if len(linears) != 3 or _has_tensors(module) or not _takes_one_argument(module):
            return None
        calls: list[Call] = []
        x = _random(1, NUM_ROWS, next(iter(linears.values())).in_features)
        y = _with(module, _stand_ins(linears, calls))(x)
        if len(calls) != 3 or {call.name for call in calls} != linears.keys():
            return None
        last = calls.pop()
        if not (_close(y, last.y) and all(_close(call.x, x) for call in calls)):
            return None
        for gate, up in permutations(calls):
            gate_up = torch.cat((gate.y, up.y), dim=-1)[0]
            for activation in get_args(Activation):
                is_equal = _close(last.x[0], self._ops.gated_activation(gate_up, activation))
                if is_equal and _are_fusible(module, (gate.name, up.name)):
                    own = (linears[call.name] for call in (gate, up, last))
                    return FoundMLP(*own, activation)  # pyright: ignore
        return None

    def _linears_in(self, path: str, module: nn.Module) -> dict[str, ModelLinear]:
        """Returns the linears that are children of a module and take adapters, by name."""
        paths = {name: f"{path}.{name}" for name, _ in module.named_children()}
        return {name: self._linears[at] for name, at in paths.items() if at in self._linears}


class _Layers:
    """Recogniser of whole layers. It runs the backbone with stand-ins for all layers, and then each
    layer, with the arguments that its stand-in received, and with stand-ins for its blocks."""

    def __init__(
        self,
        blocks: _Blocks,
        backbone: nn.Module,
        read: Callable[[str], Tensor],
        num_positions: int,
    ) -> None:
        self._blocks = blocks
        self._sites = blocks.spec.recorded.sites
        self._backbone = backbone
        self._read = read
        self._root = next(path for path, own in blocks.model.named_modules() if own is backbone)
        self._list = next(
            name
            for name, child in backbone.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == len(self._sites)
        )
        self._positions = torch.linspace(0, num_positions - 1, NUM_ROWS).long()
        self._calls, self._result = self._run(self._positions)
        self._num_positions = num_positions
        self._rope_keys: list[tuple[int, int]] = []
        """Id of the argument `ROPE` of the layers that use each table in `Recognised.ropes`, or 0
        for a table that rotates nothing, and the head size of these layers."""

    def find(self) -> FoundLayers | None:
        """Records all attention modules that are recognised. Returns all layers and the norm after
        them, if each layer is recognised and its input is the result of the layer before it."""
        num_layers = len(self._sites)
        found = [
            _attempt(lambda i=i, s=site: self._layer(i, s)) for i, site in enumerate(self._sites)
        ]
        layers = [layer for layer in found if layer is not None]
        names = [call.name for call in self._calls]
        if len(layers) < num_layers or names[:-1] != [str(i) for i in range(num_layers)]:
            return None
        if not all(_close(after.x, before.y) for before, after in pairwise(self._calls)):
            return None
        is_uniform = len({(site.num_kv_heads, site.padded_dim) for site in self._sites}) == 1
        if not is_uniform or not _close(self._result, self._calls[-1].y):
            return None
        norm = self._blocks.found.norms[f"{self._root}.{names[-1]}"]
        return FoundLayers(f"{self._root}.{self._list}", layers, norm)

    def _run(self, positions: Tensor) -> tuple[list[Call], Tensor]:
        """Runs the backbone with stand-ins. Returns the calls of layers, whose names are their
        numbers, and of other modules with parameters, and the hidden states."""
        calls: list[Call] = []
        children: dict[str, nn.Module] = {}
        for name, child in self._backbone.named_children():
            path = f"{self._root}.{name}"
            if name == self._list:
                numbers = range(len(self._sites))
                children[name] = nn.ModuleList(StandIn(str(i), calls) for i in numbers)
            elif isinstance(child, nn.Embedding):
                children[name] = StandInTable()
            elif next(child.parameters(), None) is not None:
                children[name] = StandIn(name, calls)
            elif child._buffers:
                children[name] = twin = _with(child, {})
                twin._buffers = {own: self._read(f"{path}.{own}") for own in child._buffers}
        output = _with(self._backbone, children)(
            input_ids=torch.zeros_like(positions).unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
        )
        return calls, output.last_hidden_state

    def _layer(self, index: int, site: AttentionSite) -> FoundLayer | None:
        path, given = f"{self._root}.{self._list}.{index}", self._calls[index]
        module, found = self._blocks.model.get_submodule(path), self._blocks.found
        calls: list[Call] = []
        children: dict[str, nn.Module] = {}
        for name, child in module.named_children():
            at = f"{path}.{name}"
            if next(child.parameters(), None) is not None:
                children[name] = StandIn(at, calls, is_attention=at == site.module)
        x = _random(1, NUM_ROWS, self._blocks.spec.recorded.shape.hidden_size)
        result = _attempt(lambda: _with(module, children)(x, *given.args, **given.kwargs))
        call = next(call for call in calls if call.name == site.module)
        if call.kwargs.get(ROPE) is not given.kwargs.get(ROPE):
            return None
        attention = self._blocks.attention(site, call, lambda a: self._find_rope(index, a))
        if attention is None:
            return None
        found.attentions[site.module] = attention
        mlps = [call.name for call in calls if call.name in found.mlps]
        if result is None or _has_tensors(module) or len(mlps) != 1:
            return None
        mlp = found.mlps[mlps[0]]
        norms = _find_norms(calls, x, result, site.module, mlps[0])
        if norms is None or {attention.output.layer, mlp.down.layer} != {index}:
            return None
        at = (None if each is None else found.norms[each] for each in norms)
        return FoundLayer(attention, mlp, *at)

    def _find_rope(self, index: int, angles: Tensor) -> int | None:
        """Returns the index of the rotary table with these angles [T, D] at the tested positions.
        Adds the table, unless the model would have more tables than kinds of layers."""
        dim, own = angles.shape[1], self._calls[index].kwargs.get(ROPE)
        is_unrotated = torch.equal(angles, _unrotated(NUM_ROWS, dim))
        key = 0 if is_unrotated else id(own), dim
        if key in self._rope_keys:
            return self._rope_keys.index(key)
        if len(self._rope_keys) == self._blocks.spec.num_ropes:
            return None
        if is_unrotated:
            table = _unrotated(self._num_positions, dim)
        else:
            parts = torch.arange(self._num_positions).split(MAX_POSITIONS)
            calls = (self._run(positions)[0][index] for positions in parts)
            table = torch.cat([_angles(call.kwargs[ROPE], dim) for call in calls])
        if not _close(table[self._positions], angles):
            return None
        self._rope_keys.append(key)
        self._blocks.found.ropes.append(table)
        return len(self._rope_keys) - 1


def _find_norms(
    calls: list[Call], x: Tensor, result: Tensor, attention: str, mlp: str
) -> tuple[str | None, str | None, str | None, str | None] | None:
    """Returns the paths of the norms before attention, after it, before the MLP and after it, each
    None if there is no such norm. Returns None if the calls of a layer with input x compute another
    result."""
    left, found = [*calls], list[str | None]()

    def norm(value: Tensor, block: str) -> Tensor:
        """Applies the norm of `value` if it is the next call. block: block before or after it."""
        is_next = bool(left) and left[0].name != block and _close(left[0].x, value)
        found.append(left[0].name if is_next else None)
        return left.pop(0).y if is_next else value

    for block in (attention, mlp):
        value = norm(x, block)
        if not left or left[0].name != block or not _close(left[0].x, value):
            return None
        x = x + norm(left.pop(0).y, mlp)
    if left or not _close(x, result):
        return None
    return found[0], found[1], found[2], found[3]


def _attempt(work: Callable[[], T]) -> T | None:
    """Returns the result of `work`, or None if it raises an error."""
    try:
        return work()
    except Exception as error:  # transformers' code may raise any kind of exception
        log.debug("a module is left to transformers: %r", error)
        return None


def _with(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """Returns a copy of a module in which some children are replaced. Both share all other
    attributes."""
    twin = copy(module)
    twin._modules = {**module._modules, **children}
    return twin


def _stand_ins(linears: dict[str, ModelLinear], calls: list[Call]) -> dict[str, nn.Module]:
    return {name: StandIn(name, calls, linear.out_features) for name, linear in linears.items()}


def _has_tensors(module: nn.Module) -> bool:
    """Returns whether the module itself, without its children, has parameters or buffers."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None for tensor in own)


def _takes_one_argument(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _are_fusible(module: nn.Module, names: Sequence[str]) -> bool:
    """Returns whether all of these linears have a bias, or none of them."""
    return len({module.get_submodule(name).bias is None for name in names}) == 1


def _angles(embeddings: tuple[Tensor, Tensor], dim: int) -> Tensor:
    """Returns cosines and sines [1, T, D] as angles [T, D], in the form of our rotary tables."""
    return torch.cat([part[0, :, : dim // 2] for part in embeddings], dim=-1).float()


def _unrotated(num_positions: int, dim: int) -> Tensor:
    """Returns the angles [num_positions, dim] that leave queries and keys unchanged."""
    return torch.cat([torch.ones(num_positions, dim // 2), torch.zeros(num_positions, dim // 2)], 1)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates x [T, heads, D] by angles [T, D], as `Ops.rope_write_kv` does."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _random(*shape: int) -> Tensor:
    """Returns random numbers [1, T, ...]. The T rows have different sizes, so that a module that
    limits its numbers is noticed."""
    sizes = torch.logspace(-1, 3, shape[1]).view(1, -1, *(1 for _ in shape[2:]))
    return sizes * torch.randn(shape)


def _close(x: Tensor, y: Tensor) -> bool:
    """Returns whether two results are equal within rounding, which is relative to the largest
    number of each row, because small sums of large numbers are inexact."""
    if x.shape != y.shape:
        return False
    x, y = x.float(), y.float()
    rounding = 1e-6 * y.abs().amax(dim=-1, keepdim=True)
    return bool(((x - y).abs() <= 1e-5 + rounding + 1e-4 * y.abs()).all())
