"""Records the structure of a transformers model by running it on two short texts.

The model is then run in packed form: the rows of both texts form one input, and only our attention
function knows where each text begins. The model is refused unless the logits of the packed run
equal, within rounding, the logits that transformers computes for each text alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adapters.manifest import BaseModelShape, ModelLinear
from workers.models.plan import MAX_PADDING
from workers.models.transformers_modules import (
    NotComputable,
    detach_backbone,
    library,
    replace_module,
)
from workers.models.transformers_spec import AttentionSite, Recorded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = "loraplex_probe"
"""Name under which the probe's attention and mask functions are registered in transformers."""
LENGTHS = (11, 7)
"""Number of tokens of each of the two texts."""
EXACT, ROUNDED = 1e-3, 0.15
"""Maximum relative error (by norm) of the logits, for float32 models and for models in half
precision, whose rounding errors add up over the layers. Observed errors: 1e-6 in float32, 0.03 in
half precision with 30 layers."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Placeholder for an attention mask. window: number of tokens of the sliding window, or None if
    the attention is causal without a window."""

    window: int | None


@dataclass(slots=True)
class Probe:
    """Record of the calls of attention modules and linears during forward passes. text_of_row:
    index of the text to which each row of the packed input belongs."""

    text_of_row: Tensor
    sites: dict[str, AttentionSite] = field(default_factory=dict[str, AttentionSite])
    rows: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Number of rows in each call of a linear, by the linear's module path."""
    is_packed: bool = False


class NotServable(Exception):
    """Error raised if a property of the model prevents workers from running transformers' code for
    it."""


def probe(model: PreTrainedModel) -> Recorded:
    """Runs the model and returns its structure. The model is unusable afterwards, because its
    linears have been replaced. Raises UnsupportedModel if a worker cannot serve the model."""
    model_type = model.config.model_type
    try:
        return _probe(model)
    except NotServable as error:
        raise NotComputable(model_type, str(error)) from error
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        why = f"its forward pass fails in packed form: {error}"
        raise NotComputable(model_type, why) from error


@torch.inference_mode()
def _probe(model: PreTrainedModel) -> Recorded:
    config = model.config
    if model._is_stateful:
        raise NotServable("it has recurrent state")
    aliases = _aliases(model)
    _refuse_loose_tensors(model)
    _check_head(model.get_output_embeddings())
    matrix_numbers, other_numbers = _count_numbers(model)
    linears = {path: own for path, own in model.named_modules() if type(own) is nn.Linear}
    tolerance = EXACT if model.dtype is torch.float32 else ROUNDED
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(config.vocab_size, (n,), generator=generator) for n in LENGTHS]
    alone = [_logits(model, text, torch.arange(len(text))) for text in texts]

    text_of_row = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(LENGTHS))
    found = Probe(text_of_row)
    paths: dict[nn.Module, str] = {own: path for path, own in model.named_modules()}
    for path, own in linears.items():
        replace_module(model, path, _Watched(own, path, found))
    _use_probe_attention(model, found, paths)
    masked = [_logits(model, texts[0], torch.arange(LENGTHS[0]))]
    sites = tuple(found.sites.values())
    if len(sites) != config.num_hidden_layers:
        raise NotServable(
            f"{len(sites)} of its {config.num_hidden_layers} layers call the attention function of "
            "transformers' interface, so it has recurrent state or an attention of its own"
        )
    found.rows.clear()
    found.is_packed = True
    masked.append(_logits(model, texts[1], torch.arange(LENGTHS[1])))
    found.rows.clear()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    backbone = detach_backbone(model)
    output = backbone(
        input_ids=torch.cat(texts).unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
    )
    packed = model(inputs_embeds=output.last_hidden_state, use_cache=False).logits[0].float()
    _compare("our attention", torch.cat(masked), torch.cat(alone), tolerance)
    _compare("several texts in one step", packed, torch.cat(masked), tolerance)

    adapted = [path for path in linears if found.rows.get(path) == [len(packed)]]
    plain = [path for path in linears if path not in adapted]
    shape = _shape(model, sites, {path: linears[path] for path in adapted})
    return Recorded(shape, sites, aliases, tuple(plain), matrix_numbers, other_numbers)


def _logits(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    output = model(
        input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
    )
    return output.logits[0].float()


def _compare(change: str, logits: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((logits - expected).norm() / (expected - expected.mean()).norm())
    if not error <= tolerance:
        raise NotServable(
            f"{change} changes its logits by {error:.2g} of their norm, allowed are {tolerance:g}"
        )


class _Watched(nn.Module):
    """Linear that records its calls. Like the module that replaces a linear in a worker, this
    module has no `weight`."""

    def __init__(self, linear: nn.Linear, path: str, found: Probe) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._call = linear.forward
        self._path = path
        self._found = found

    def forward(self, x: Tensor) -> Tensor:
        self._found.rows.setdefault(self._path, []).append(x.numel() // x.shape[-1])
        return self._call(x)


def _use_probe_attention(model: PreTrainedModel, found: Probe, paths: dict[nn.Module, str]) -> None:
    transformers = library()
    model_type = model.config.model_type

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        path = paths[module]
        if not found.is_packed:
            if not isinstance(attention_mask, Mask):
                raise NotServable(f"{path} attends without a causal mask")
            if path in found.sites:
                raise NotServable(f"{path} attends twice")
            if sliding_window not in (None, attention_mask.window):
                raise NotServable(
                    f"{path} has a window of {sliding_window}, and its mask one of "
                    f"{attention_mask.window}"
                )
            found.sites[path] = AttentionSite(
                path,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                value_dim=value.shape[3],
                window=attention_mask.window,
            )
        texts = found.text_of_row[: query.shape[2]]
        return _attend(texts, found.sites[path], query, key, value, scaling, softcap, s_aux), None

    def mask(mask_function: Any, **_: object) -> Mask | None:
        return None if found.is_packed else _recognise(mask_function)

    transformers.AttentionInterface.register(PROBE, attend)
    transformers.AttentionMaskInterface.register(PROBE, mask)
    if not model._can_set_attn_implementation():
        raise NotServable(f"the attention of {model_type} ignores transformers' interface")
    model.set_attn_implementation(PROBE)


def _attend(
    texts: Tensor,
    site: AttentionSite,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes causal attention, in which each row attends only to rows of its own text."""
    group = site.num_heads // site.num_kv_heads
    key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    scale = site.head_dim**-0.5 if scaling is None else scaling
    scores = (query.float() @ key.float().transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(len(texts))
    distance = rows.unsqueeze(1) - rows
    seen = (distance >= 0) & (texts.unsqueeze(1) == texts)
    if site.window is not None:
        seen &= distance < site.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(-1, -1, len(texts), 1)
        scores = torch.cat([scores, sink], dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : len(texts)].to(value.dtype)
    return (probabilities @ value).transpose(1, 2).contiguous()


def _recognise(mask_function: Any) -> Mask:
    """Returns the attention mask that transformers describes by `mask_function`.

    Raises NotServable if the mask is neither causal nor a sliding window.
    """
    zero = torch.tensor(0)

    def seen(row: int, columns: Tensor) -> Tensor:
        return mask_function(zero, zero, torch.tensor(row), columns).expand(columns.shape)

    far = 1 << 20
    columns = torch.arange(far + 2)
    last = seen(far, columns)
    window = int(last.sum())
    expected = (columns <= far) & (columns > far - window)
    near = columns[: 2 * LENGTHS[0]]
    is_causal = torch.equal(last, expected) and all(
        torch.equal(seen(row, near), (near <= row) & (near > row - window))
        for row in range(LENGTHS[0])
    )
    if not is_causal:
        raise NotServable("its attention mask is neither causal nor a sliding window")
    return Mask(None if window == far + 1 else window)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Returns the names of parameters that have several names: a map from each name except the
    first to the first name of the same parameter."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(tensor), name)
        if known != name:
            aliases[name] = known
    return aliases


def _refuse_loose_tensors(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                raise NotServable(f"{path}.{name} is a tensor outside of parameters and buffers")


def _check_head(module: nn.Module | None) -> None:
    if type(module) is not nn.Linear:
        raise NotServable("its output projection is no linear")


def _count_numbers(model: nn.Module) -> tuple[int, int]:
    """Returns an upper bound of the number of elements of the matrices of all linears and
    embeddings, with padding, and an upper bound for all other tensors."""
    matrices = others = 0
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if isinstance(module, (nn.Linear, nn.Embedding)) and tensor.ndim == 2:
                matrices += (tensor.shape[0] + MAX_PADDING) * (tensor.shape[1] + 1)
            else:
                others += tensor.numel() + MAX_PADDING
    return matrices, others


def _shape(
    model: PreTrainedModel, sites: tuple[AttentionSite, ...], adapted: dict[str, nn.Linear]
) -> BaseModelShape:
    """Returns the base model's shape, against which adapters are checked. Takes the number and size
    of heads from the first layer."""
    config: Any = model.config
    num_layers: int = config.num_hidden_layers
    linears: list[ModelLinear] = []
    for path, linear in adapted.items():
        index = re.search(r"\.(\d+)\.", path)
        layer = num_layers if index is None else int(index[1])
        linears.append(ModelLinear(path, layer, linear.in_features, linear.out_features))
    inner = getattr(config, "intermediate_size", 0)
    return BaseModelShape(
        digest="",
        model_type=config.model_type,
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        num_heads=sites[0].num_heads,
        num_kv_heads=sites[0].num_kv_heads,
        head_dim=sites[0].head_dim,
        intermediate_size=inner if isinstance(inner, int) else 0,
        vocab_size=config.vocab_size,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        linears=tuple(linears),
    )
