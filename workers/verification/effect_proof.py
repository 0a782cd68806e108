"""What an adapter must do, computed from its files, and whether the worker does that.

Of every bound module, with random rows x: what the device's op adds against float32 x A B. Of
weights of the base model that the file repeats: whether they are the base model's. Of a short
prompt: how much the adapter changes each token's log-probability in the running engine against how
much it does by the reference backend.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adapters.errors import AdapterRejected, AdapterUnavailable
from adapters.manifest import BaseModelShape
from adapters.pool.factors import Factors
from adapters.pool.image import AdapterImage
from adapters.pool.loader import stored_files
from adapters.pool.lora import ImageLayout, pack
from adapters.store.folder import Store
from ops.base import EMBEDDING, HEAD, FusedLinear
from ops.block_matrix import densify
from workers.models.checkpoint import Checkpoint
from workers.models.spec import ModelSpec
from workers.models.transformers_spec import TransformersSpec
from workers.verification.scoring import score_tokens
from workers.verification.transformers_scoring import score_with_transformers

SEED = 20250923
BASE = ""
MAX_SCORES = 1024
"""Maximum number of adapters whose scores are kept: 60 bytes each."""
PROBE_TOKENS = 16
PROBE_ROWS = 4
"""Rows of x: a wrong factor shows in each."""

FUSED_LINEARS = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)

DELTA_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Allowed error of a projection's product, as a part of its norm. float32: the order of sums (seen:
3e-7). bfloat16: A and B are rounded, each by up to 2^-9 (seen: 3e-3). A factor that is zero, of
another projection or scaled otherwise is off by 0.4 and more."""

CHANGE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.05}
NOISE_FACTOR = 8.0
LEAST_SCORE_ERROR = 1e-4
"""Allowed error of the change of the log-probabilities: a part of its norm (seen: 4e-5 and 0.01),
so many times the error that the base model alone has here (seen: 3), and a least one per token."""


class NotProved(Exception):
    """`is_final`: the adapter itself is at fault, and another try will not help."""

    def __init__(self, code: str, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.code = code
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class Expected:
    """checksum: of the image that the files give. deltas[layer][linear], float32 [PROBE_ROWS, out]:
    what the adapter adds for `EffectProof.inputs`. scores, base_scores float32 [PROBE_TOKENS - 1]:
    log-probability of each token of the probe but the first, with the adapter and without."""

    checksum: str
    deltas: list[list[Tensor]]
    scores: Tensor
    base_scores: Tensor


class EffectProof:
    """Computes what adapters of one base model must do, and compares. Used by one thread, except
    for what is constant.

    folder: the canonical model. layout: of the images whose checksums are wanted; its dtype is the
    serving dtype.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        spec: ModelSpec | TransformersSpec,
        shape: BaseModelShape,
        layout: ImageLayout,
    ) -> None:
        self._store = store
        self._folder = folder
        self._spec = spec
        self._shape = shape
        self.layout = layout
        self._scores: OrderedDict[str, Tensor] = OrderedDict()
        """By the adapter's digest, those computed last; '' for the base model."""
        random = torch.Generator().manual_seed(SEED)
        self.tokens: list[int] = torch.randint(
            spec.vocab_size, (PROBE_TOKENS,), generator=random
        ).tolist()
        self._random = random
        self._rows: dict[int, Tensor] = {}
        """Rows x of each width, float32 [PROBE_ROWS, width], exact in bfloat16."""
        self.inputs = [
            [(fused, self._rows_of(fused.in_features)) for fused in _fused_linears(shape, layer)]
            for layer in range(shape.num_layers + bool(shape.linears))
        ]
        """The fused linears of each layer, and their x. The layer after the last one has the output
        matrix and the embedding, whose x are token ids, int32 [PROBE_ROWS]."""
        if not shape.linears:
            self.inputs.append(self._outer_inputs(shape))

    def expect(self, digest: str, next_ones: Sequence[str] = ()) -> Expected:
        """Reads the adapter's files.

        next_ones: adapters that will be expected next, which are scored in the same pass through
        the model. Raises AdapterRejected, AdapterUnavailable, NotProved or OSError.
        """
        files = stored_files(self._store, digest)
        factors = Factors(files, self._shape)
        self._check_copies(factors)
        if digest not in self._scores:
            self._score({digest: factors} | self._readable(next_ones))
        return Expected(
            checksum=AdapterImage.of(digest, *pack(files, self._shape, self.layout)).checksum,
            deltas=[
                [self._delta(factors, layer, fused, x) for fused, x in inputs]
                for layer, inputs in enumerate(self.inputs)
            ],
            scores=self._scores[digest],
            base_scores=self._scores[BASE],
        )

    def _rows_of(self, width: int) -> Tensor:
        if width not in self._rows:
            drawn = torch.randn(PROBE_ROWS, width, generator=self._random)
            self._rows[width] = drawn.bfloat16().float()
        return self._rows[width]

    def _delta(self, factors: Factors, layer: int, fused: FusedLinear, x: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for projection, width in zip(fused.projections, fused.widths, strict=True):
            found = factors.read(layer, projection)
            if found is None:
                parts.append(torch.zeros(len(x), width))
            else:
                a, b = found
                parts.append((a[:, x].T if x.dtype is torch.int32 else x @ a.T) @ b.T)
        return torch.cat(parts, dim=1)

    def _outer_inputs(self, shape: BaseModelShape) -> list[tuple[FusedLinear, Tensor]]:
        head = FusedLinear((HEAD,), (shape.vocab_size,), shape.hidden_size)
        embedding = FusedLinear((EMBEDDING,), (shape.hidden_size,), shape.vocab_size)
        ids = torch.tensor(self.tokens[:PROBE_ROWS], dtype=torch.int32)
        return [(head, self._rows_of(head.in_features)), (embedding, ids)]

    def _check_copies(self, factors: Factors) -> None:
        """Raises NotProved unless the weights that the file repeats are the base model's, rounded
        to the file's dtype."""
        if not factors.copies:
            return
        with Checkpoint(self._folder) as checkpoint:
            for copy in factors.copies:
                is_tied = copy.module == "embed_tokens" or self._spec.tie_word_embeddings
                module = "model.embed_tokens" if is_tied else "lm_head"
                weight = checkpoint.get(f"{module}.weight")
                for first, rows in factors.read_copy(copy):
                    own = densify([weight[first : first + len(rows)]])
                    if not torch.equal(own.to(rows.dtype), rows):
                        raise NotProved(
                            "adapter.base.weights",
                            f"{copy.name} is not the base model's: train on the base model's own"
                            " weights, with an unchanged vocabulary",
                            is_final=True,
                        )

    def _readable(self, digests: Sequence[str]) -> dict[str, Factors]:
        """Returns the factors of those adapters that are not scored yet. The error of one that
        cannot be read is raised when it is expected itself."""
        found: dict[str, Factors] = {}
        for digest in digests:
            if digest not in self._scores:
                with contextlib.suppress(AdapterRejected, AdapterUnavailable, OSError):
                    found[digest] = Factors(stored_files(self._store, digest), self._shape)
        return found

    def _score(self, adapters: dict[str, Factors]) -> None:
        """Scores the probe with each of the adapters, and with none."""
        dtype, factors = self.layout.dtype, [*adapters.values()]
        if isinstance(self._spec, ModelSpec):
            scores = score_tokens(
                self._folder, self._spec, self._shape, dtype, self.tokens, factors
            )
        else:
            scores = score_with_transformers(self._folder, self._spec, dtype, self.tokens, factors)
        self._scores.update(zip([*adapters, BASE], scores, strict=True))
        self._scores.move_to_end(BASE)
        while len(self._scores) > MAX_SCORES:
            self._scores.popitem(last=False)

    def check_deltas(self, expected: Expected, deltas: list[list[Tensor]]) -> str | None:
        """The projection that differs most from the files, in words; None if none does too much.

        deltas: as the op computes them, in the order of `Expected.deltas`.
        """
        allowed = DELTA_ERROR[self.layout.dtype]
        worst, where = allowed, None
        for layer, (wanted, computed) in enumerate(zip(expected.deltas, deltas, strict=True)):
            for (fused, _), want, got in zip(self.inputs[layer], wanted, computed, strict=True):
                for projection, w, g in zip(
                    fused.projections,
                    want.split(fused.widths, dim=1),
                    got.split(fused.widths, dim=1),
                    strict=True,
                ):
                    error = _relative_error(g, w)
                    if error > worst:
                        name = self._shape.modules(layer)[projection]
                        worst, where = error, self._shape.module_path(layer, name)
        if where is None:
            return None
        return f"{where} is off by {worst:.3g} of its norm, allowed are {allowed:.3g}"

    def check_scores(self, expected: Expected, scores: Tensor, base_scores: Tensor) -> float:
        """The adapter's largest effect on a log-probability. Raises NotProved.

        scores, base_scores: of the engine, like those expected.
        """
        change = scores - base_scores
        wanted = expected.scores - expected.base_scores
        effect = float(change.abs().max())
        if effect == 0.0 and any(delta.any() for layer in expected.deltas for delta in layer):
            raise NotProved(
                "adapter.effect.none",
                "its factors are not zero, but no log-probability of the probe changes",
                is_final=True,
            )
        noise = float((base_scores - expected.base_scores).norm())
        allowed = (
            CHANGE_ERROR[self.layout.dtype] * float(wanted.norm())
            + NOISE_FACTOR * noise
            + LEAST_SCORE_ERROR * len(scores) ** 0.5
        )
        error = float((change - wanted).norm())
        if not error <= allowed:
            raise NotProved(
                "adapter.effect.logits",
                f"the change of the log-probabilities is off by {error:.3g} from the reference's "
                f"{float(wanted.norm()):.3g}, allowed are {allowed:.3g}",
                is_final=True,
            )
        return effect


def _fused_linears(shape: BaseModelShape, layer: int) -> list[FusedLinear]:
    fused = [*shape.trained_modules(layer).values()] if shape.linears else FUSED_LINEARS
    fused_linears: list[FusedLinear] = []
    for names in fused:
        sizes = [shape.projection_shape(layer, name) for name in names]
        projections = tuple(shape.projections.index(name) for name in names)
        widths = tuple(width for _, width in sizes)
        fused_linears.append(FusedLinear(projections, widths, sizes[0][0]))
    return fused_linears


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    """Infinite where nothing is wanted and something is there, or what is there is no number."""
    error, norm = float((got - wanted).norm()), float(wanted.norm())
    relative = error / norm if norm else error * math.inf if error else 0.0
    return math.inf if math.isnan(relative) else relative
