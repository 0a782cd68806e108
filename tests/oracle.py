"""transformers + peft, alone: what every answer is held against.

"Equal" is greedy in float32: each generated token is the oracle's argmax given the prompt and the
tokens before it, which by induction is the oracle's own greedy continuation. Where the oracle's two
best logits are less than `TIE` apart, either is right, and that answer's comparison ends there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.variants import calculate_alora_offsets
from torch import Tensor
from transformers import AutoModelForCausalLM

from workers.models.unnamed_ids import read_unnamed_ids

TIE = 1e-4


@dataclass
class Verdict:
    """wrong and ties: (what, position in the answer, oracle's token, our token, oracle's gap)."""

    num_tokens: int = 0
    wrong: list[tuple[str, int, int, int, float]] = field(default_factory=list)
    ties: list[tuple[str, int, int, int, float]] = field(default_factory=list)

    def add(self, logits: Tensor, answer: list[int], what: str) -> None:
        """One answer; logits: float32 [at least len(answer), V], the oracle's before each token."""
        self.num_tokens += len(answer)
        for position, token in enumerate(answer):
            best = logits[position].topk(2)
            if token == best.indices[0]:
                continue
            gap = float(best.values[0] - best.values[1])
            record = (what, position, int(best.indices[0]), token, gap)
            (self.ties if gap < TIE else self.wrong).append(record)
            return

    def assert_equal(self, *, max_ties: int = 2) -> None:
        assert not self.wrong, f"{len(self.wrong)} answers differ, first: {self.wrong[:4]}"
        assert len(self.ties) <= max_ties, self.ties


class Oracle:
    """One base model and its adapters, by name."""

    def __init__(
        self,
        model: Path,
        adapters: dict[str, Path],
        dtype: torch.dtype = torch.float32,
        kind: Any = AutoModelForCausalLM,
    ) -> None:
        """kind: AutoModel for adapters that were trained without the output matrix."""
        self._model = kind.from_pretrained(model, dtype=dtype).eval()
        config = self._model.config.get_text_config()
        ends = config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.unnamed_ids = read_unnamed_ids(model, config.vocab_size, ends)
        for name, folder in adapters.items():
            if isinstance(self._model, PeftModel):
                self._model.load_adapter(str(folder), name)
            else:
                self._model = PeftModel.from_pretrained(self._model, str(folder), name).eval()

    @torch.inference_mode()
    def logits(
        self, tokens: list[int], adapter: str | None, last: int = 0, num_prompt: int | None = None
    ) -> Tensor:
        """float32 [last or all of len(tokens), V]. An activated LoRA is invoked by the first
        num_prompt tokens only (None: all are prompt)."""
        ids = torch.tensor([tokens])
        if adapter is None and isinstance(self._model, PeftModel):
            with self._model.disable_adapter():
                return self._model(ids, logits_to_keep=last).logits[0].float()
        if adapter is not None and self._model.active_adapter != adapter:
            self._model.set_adapter(adapter)
        invoked = {} if adapter is None else self._invoked(adapter, ids, num_prompt or len(tokens))
        return self._model(ids, logits_to_keep=last, **invoked).logits[0].float()

    @torch.inference_mode()
    def hidden(self, tokens: list[int], adapter: str | None) -> Tensor:
        """float32 [len(tokens), K]: the last hidden states, after the final norm."""
        ids = torch.tensor([tokens])
        is_adapted = isinstance(self._model, PeftModel)
        base = self._model.get_base_model() if is_adapted else self._model
        decoder = getattr(base, "model", base)
        if adapter is None and is_adapted:
            with self._model.disable_adapter():
                return decoder(ids).last_hidden_state[0].float()
        if adapter is not None:
            self._model.set_adapter(adapter)
        return decoder(ids).last_hidden_state[0].float()

    def _invoked(self, adapter: str, ids: Tensor, num_prompt: int) -> dict[str, Any]:
        """What peft's `generate` finds in the prompt, kept for the whole sequence; else the forward
        pass would look for invocations in what was generated too."""
        if not self._model.peft_config[adapter].alora_invocation_tokens:
            return {}
        prompt = ids[:, :num_prompt]
        (offset,) = calculate_alora_offsets(self._model.peft_config, adapter, prompt)
        after = ids.shape[1] - num_prompt
        return {"alora_offsets": [None if offset is None else offset + after]}

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
            suppress_tokens=self.unnamed_ids or None,
        )
        return answer[0].tolist()

    def judge(
        self, verdict: Verdict, prompt: list[int], answer: list[int], adapter: str | None, what: str
    ) -> None:
        """Adds one answer to the verdict."""
        tokens = prompt + answer[:-1]
        logits = self.logits(tokens, adapter, last=len(answer), num_prompt=len(prompt)).clone()
        logits[:, self.unnamed_ids] = -torch.inf
        verdict.add(logits, answer, what)
