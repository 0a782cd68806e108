"""Names the files beside weights that are not used. Torch-free.

Every file of a folder is used, refused or named. Only the files in `SILENT` are left out without a
word, because they do not change what a model or an adapter computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

TRAINING_STATE = (
    *("optimizer*", "scheduler*", "scaler.pt", "sampler*.bin", "rng_state*", "random_states_*"),
    *("trainer_state.json", "training_args.*", "trainer_log.jsonl", "*_results.json", "latest"),
    *("training_*.png", "global_step*", "zero_to_fp32.py", "checkpoint-*", "runs", "wandb"),
    *("events.out.tfevents.*", "profile_*.json"),
)
"""Files with which trainers resume a training or report on it."""
DOCUMENTS = (
    *(".*", "README*", "LICENSE*", "NOTICE*", "USE_POLICY*", "*.md", "*.png", "*.jpg", "*.jpeg"),
    *("*.svg", "*.gif", "*.pdf", "modelcard.json"),
)
SILENT = (*TRAINING_STATE, *DOCUMENTS)
"""Patterns of the names of files and folders that are never named."""
WEIGHTS = re.compile(r".*\.(bin|pt|pth|ckpt|safetensors)")
MAX_NAMED = 20


def name_unused(names: Iterable[str], is_used: Callable[[str], bool]) -> list[str]:
    """Returns sentences that name the files or folders that are neither used nor silent. Files that
    look like weights have a sentence of their own, because answers may depend on them."""
    unused = sorted(
        name
        for name in set(names)
        if not is_used(name) and not any(fnmatchcase(name, pattern) for pattern in SILENT)
    )
    weights = [name for name in unused if WEIGHTS.fullmatch(name)]
    others = [name for name in unused if not WEIGHTS.fullmatch(name)]
    sentences: list[str] = []
    if weights:
        sentences.append(f"not used, although trained weights may be in it: {list_names(weights)}")
    if others:
        sentences.append(f"not used: {list_names(others)}")
    return sentences


def list_names(names: list[str]) -> str:
    """Returns names as text, of which only the first MAX_NAMED are shown."""
    shown = ", ".join(name[:64] for name in names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
