"""Models from wherever they are into the store, as canonical folders named by their digest."""

from __future__ import annotations

from pathlib import Path

from workers.importer.canonical import ImportRefused, publish
from workers.importer.gguf import write_from_gguf
from workers.importer.huggingface import write_from_huggingface
from workers.models.progress import Progress

__all__ = ["ImportRefused", "import_model"]


def import_model(path: Path, store_root: Path, progress: Progress | None = None) -> str:
    """Imports a Hugging Face directory or a `.gguf` file and returns the digest of its folder.

    The same source gives the same digest, and importing it again changes nothing. Raises
    ImportRefused, UnsupportedModel or CheckpointError: ValueErrors that name what was found; the
    store is then as before.
    """
    if path.is_dir():
        return publish(store_root, lambda folder: write_from_huggingface(path, folder, progress))
    if path.is_file() and path.suffix == ".gguf":
        return publish(store_root, lambda folder: write_from_gguf(path, folder, progress))
    raise ImportRefused(f"{path} is neither a Hugging Face directory nor a .gguf file")
