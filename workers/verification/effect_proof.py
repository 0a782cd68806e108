"""Proof that an adapter has, in a worker, the effect that the adapter's files describe.

The packed files give the checksum that the worker's image must have. The reference backend computes
how much the adapter changes the log-probability of each token of a short prompt, and the running
engine must compute the same changes within an allowed error. If the files repeat weights of the
base model, these weights must equal the weights of the served base model.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adapters.errors import AdapterRejected
from adapters.format.validator import AdapterFiles
from adapters.manifest import BaseModelShape
from adapters.pool.factors import Factors
from adapters.pool.loader import stored_files
from adapters.pool.lora import ImageLayout, pack
from adapters.pool.packed_image import AdapterImage
from adapters.pool.source import AdapterUnavailable
from adapters.store.folder import Store
from ops.block_matrix import densify
from workers.models.checkpoint import Checkpoint
from workers.models.spec import ModelSpec
from workers.models.transformers_spec import TransformersSpec
from workers.verification.scoring import score_tokens
from workers.verification.transformers_scoring import score_with_transformers

SEED = 20250923
BASE = ""
MAX_SCORES = 1024
"""Maximum number of adapters whose scores are kept. The scores of one adapter take 60 bytes."""
PROBE_TOKENS = 16

CHANGE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.05}
NOISE_FACTOR = 8.0
LEAST_SCORE_ERROR = 1e-4
"""Terms of the allowed error. An adapter changes the log-probabilities of the probe's tokens. The
norm of the difference between the engine's changes and the reference backend's changes may be at
most the sum of three terms:

- `CHANGE_ERROR` times the norm of the reference backend's changes. The measured difference is 4e-5
  times this norm in float32, and 0.01 times in bfloat16.
- `NOISE_FACTOR` times the norm of the difference between the base model's scores in the engine and
  in the reference backend. The measured difference is 3 times this norm.
- `LEAST_SCORE_ERROR` times the square root of the number of scores.
"""


class NotProved(Exception):
    """Error raised if a proof fails. is_final: whether the adapter is at fault, so that another try
    cannot succeed."""

    def __init__(self, code: str, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.code = code
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class Expected:
    """Results that were computed from an adapter's files.

    checksum: checksum of the packed image. is_zero: whether the adapter adds nothing to any module.
    scores: log-probability, with the adapter, of each token of the probe except the first, float32
    [PROBE_TOKENS - 1]. base_scores: log-probabilities of the same tokens without the adapter.
    """

    checksum: str
    is_zero: bool
    scores: Tensor
    base_scores: Tensor


class EffectProof:
    """Proof of the effect of adapters of one base model. Only one thread may call `read` and
    `expect`.

    folder: canonical folder of the model. layout: layout of the worker's adapter images, whose
    dtype is the serving dtype.
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
        """Scores of each adapter by digest, the most recently computed last. The base model's
        scores have the key `BASE`."""
        self.num_steps = 0
        """Number of adapters that were read, plus number of layers or linears that were computed.
        The number grows while a proof makes progress. Any thread may read it."""
        random = torch.Generator().manual_seed(SEED)
        self.tokens: list[int] = torch.randint(
            spec.vocab_size, (PROBE_TOKENS,), generator=random
        ).tolist()

    def read(self, digest: str) -> tuple[AdapterFiles, Factors]:
        """Reads and checks the adapter's files. Raises AdapterRejected, AdapterUnavailable,
        NotProved or OSError."""
        files = stored_files(self._store, digest)
        factors = Factors(files, self._shape)
        self._count_step()
        self._check_copies(factors)
        return files, factors

    def expect(
        self,
        digest: str,
        next_ones: Sequence[str] = (),
        read: tuple[AdapterFiles, Factors] | None = None,
    ) -> Expected:
        """Computes from the adapter's files the results that the worker must produce.

        read: result of the method `read`. If it is None, this method reads the files. next_ones:
        digests of the adapters for which this method will be called next. They are scored in the
        same pass through the model. Raises AdapterRejected, AdapterUnavailable, NotProved or
        OSError.
        """
        files, factors = self.read(digest) if read is None else read
        if digest not in self._scores:
            self._score({digest: factors} | self._readable(next_ones))
        return Expected(
            checksum=AdapterImage.of(digest, *pack(files, self._shape, self.layout)).checksum,
            is_zero=factors.are_zero(),
            scores=self._scores[digest],
            base_scores=self._scores[BASE],
        )

    def _count_step(self) -> None:
        self.num_steps += 1

    def _check_copies(self, factors: Factors) -> None:
        """Raises NotProved if the adapter's file repeats weights of its base model, and these
        differ from the served base model's weights after rounding to the file's dtype."""
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
        """Returns the factors of the adapters that have no scores yet. Leaves out adapters that
        cannot be read, because a later call of `expect` for such an adapter raises the error."""
        found: dict[str, Factors] = {}
        for digest in digests:
            if digest not in self._scores:
                with contextlib.suppress(AdapterRejected, AdapterUnavailable, OSError):
                    found[digest] = Factors(stored_files(self._store, digest), self._shape)
        return found

    def _score(self, adapters: dict[str, Factors]) -> None:
        """Computes and stores the scores of each adapter and of the base model."""
        dtype, factors = self.layout.dtype, [*adapters.values()]
        if isinstance(self._spec, ModelSpec):
            scores = score_tokens(
                self._folder,
                self._spec,
                self._shape,
                dtype,
                self.tokens,
                factors,
                on_layer=self._count_step,
            )
        else:
            scores = score_with_transformers(
                self._folder, self._spec, dtype, self.tokens, factors, on_linear=self._count_step
            )
        self._scores.update(zip([*adapters, BASE], scores, strict=True))
        self._scores.move_to_end(BASE)
        while len(self._scores) > MAX_SCORES:
            self._scores.popitem(last=False)

    def check_scores(self, expected: Expected, scores: Tensor, base_scores: Tensor) -> float:
        """Returns the adapter's largest change of a log-probability. Raises NotProved if the
        changes that the engine computed deviate too far from the expected changes, or if an adapter
        that is not zero changes nothing.

        scores, base_scores: log-probabilities that the engine computed, shaped as in `Expected`.
        """
        change = scores - base_scores
        wanted = expected.scores - expected.base_scores
        effect = float(change.abs().max())
        if effect == 0.0 and not expected.is_zero:
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
