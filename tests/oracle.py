"""transformers + peft, alone: what every answer is held against.

"Equal" is greedy in float32: each generated token is the oracle's argmax given the prompt and the
tokens before it, which by induction is the oracle's own greedy continuation. Where the oracle's two
best logits are less than `TIE` apart, either is right, and that answer's comparison ends there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

TIE = 1e-4


@dataclass
class Verdict:
    """wrong and ties: (what, position in the answer, oracle's token, our token, oracle's gap)."""

    num_tokens: int = 0
    wrong: list[tuple[str, int, int, int, float]] = field(default_factory=list)
    ties: list[tuple[str, int, int, int, float]] = field(default_factory=list)

    def assert_equal(self, *, max_ties: int = 2) -> None:
        assert not self.wrong, f"{len(self.wrong)} answers differ, first: {self.wrong[:4]}"
        assert len(self.ties) <= max_ties, self.ties


class Oracle:
    """One base model and its adapters, by name."""

    def __init__(
        self, model: Path, adapters: dict[str, Path], dtype: torch.dtype = torch.float32
    ) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        for name, folder in adapters.items():
            if isinstance(self._model, PeftModel):
                self._model.load_adapter(str(folder), name)
            else:
                self._model = PeftModel.from_pretrained(self._model, str(folder), name).eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int], adapter: str | None, last: int = 0) -> Tensor:
        """float32 [last or all of len(tokens), V]."""
        ids = torch.tensor([tokens])
        if adapter is None and isinstance(self._model, PeftModel):
            with self._model.disable_adapter():
                return self._model(ids, logits_to_keep=last).logits[0].float()
        if adapter is not None and self._model.active_adapter != adapter:
            self._model.set_adapter(adapter)
        return self._model(ids, logits_to_keep=last).logits[0].float()

    @torch.inference_mode()
    def generate(self, prompt: list[int], adapter: str, num_tokens: int) -> list[int]:
        """Prompt and greedy answer, the end token not allowed."""
        self._model.set_adapter(adapter)
        ids = torch.tensor([prompt])
        answer = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        return answer[0].tolist()

    def judge(
        self, verdict: Verdict, prompt: list[int], answer: list[int], adapter: str | None, what: str
    ) -> None:
        """Adds one answer to the verdict."""
        logits = self.logits(prompt + answer[:-1], adapter, last=len(answer))
        verdict.num_tokens += len(answer)
        for position, token in enumerate(answer):
            best = logits[position].topk(2)
            if token == best.indices[0]:
                continue
            gap = float(best.values[0] - best.values[1])
            record = (what, position, int(best.indices[0]), token, gap)
            (verdict.ties if gap < TIE else verdict.wrong).append(record)
            return
