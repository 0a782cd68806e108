"""Imports models into the store, as canonical folders named by their digests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from adapters.store.folder import Store
from workers.importer.canonical import ImportRefused, publish
from workers.importer.gguf import write_from_gguf
from workers.importer.huggingface import write_from_huggingface
from workers.importer.weight_formats import ImportFormat, ImportFormats
from workers.models.progress import ByteProgress

__all__ = ["ImportFormat", "ImportRefused", "import_model"]


def import_model(
    path: Path,
    store: Store,
    progress: ByteProgress | None = None,
    *,
    weight_format: ImportFormat = "bfloat16",
    table_format: ImportFormat | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> str:
    """Imports a Hugging Face directory or a `.gguf` file and returns the digest of its folder in
    the store. table_format: format of the embedding and the output matrix. If it is None, these
    two matrices have the format `weight_format`, or int8 if `weight_format` is int4.

    The same source in the same formats gives the same digest, and importing the source again
    changes nothing. Raises ImportRefused, UnsupportedModel, CheckpointError or OSError. If it
    raises, the store is unchanged.
    """
    if path.is_dir():
        write = write_from_huggingface
    elif path.is_file() and path.suffix == ".gguf":
        write = write_from_gguf
    else:
        raise ImportRefused(f"{path} is neither a Hugging Face directory nor a .gguf file")
    formats = ImportFormats(weight_format, table_format)
    notes: list[str] = []

    def fill(folder: Path) -> None:
        notes.extend(write(path, folder, formats, store.check_room, progress))

    digest = publish(store, fill)
    for sentence in notes:
        note(sentence)
    return digest
