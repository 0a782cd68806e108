"""Chooses the format in which `serve` imports a base model."""

from __future__ import annotations

from pathlib import Path

from loraplex.box.importing import Formats, imported_as
from loraplex.settings import Settings
from ops.processor import Processor

FASTER_IN_BLOCKS = ("avx512bf16",)
"""Kernel variants with which the quantised block formats of .gguf files are at least as fast as
bfloat16, for 1, 8 and 32 rows. With `avx512` and `avx2`, block formats are faster for one row and
slower for eight."""


def serving_format(source: Path, settings: Settings, registered: str | None) -> Formats:
    """Returns the formats in which `serve` imports a model.

    `registered` is the digest under which the model is already served, or None. If this source was
    imported as that digest, the same formats are used again, because adapters refer to the digest.
    Otherwise, a .gguf file keeps its own format (`keep`) if this machine's kernels compute it
    faster than `bfloat16`. Both formats give the same answers.
    """
    if registered is not None and (before := imported_as(source, settings, registered)):
        return before
    variant = settings.kernel_variant or Processor.here().variants()[0]
    is_faster = variant in FASTER_IN_BLOCKS and _on_cpu(settings) and settings.dtype == "bfloat16"
    return Formats("keep") if source.suffix == ".gguf" and is_faster else Formats()


def _on_cpu(settings: Settings) -> bool:
    has_gpu = settings.device == "cuda" or Path("/dev/nvidiactl").exists()
    return settings.ops in (None, "cpu") and (settings.device == "cpu" or not has_gpu)
