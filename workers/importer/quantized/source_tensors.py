"""Tensors of a quantised source, with checks of name, shape and type."""

from __future__ import annotations

from workers.importer.canonical import ImportRefused
from workers.importer.file_tensors import FileTensor
from workers.models.checkpoint import explain_missing


class SourceTensors(dict[str, FileTensor]):
    """Tensors of a source by canonical name. Indexing with a missing name raises ImportRefused."""

    def __missing__(self, name: str) -> FileTensor:
        raise ImportRefused(explain_missing(name))

    def has_dtype(self, name: str, dtype: str) -> bool:
        return name in self and self[name].dtype == dtype

    def require(
        self, name: str, shapes: tuple[int, ...] | list[tuple[int, ...]], *dtypes: str
    ) -> FileTensor:
        """Returns a tensor. Raises ImportRefused unless its shape and type are allowed.

        shapes: the allowed shape, or a list of them. dtypes: allowed safetensors types.
        """
        tensor = self[name]
        allowed = shapes if isinstance(shapes, list) else [shapes]
        if tensor.shape not in allowed:
            words = " or ".join(map(str, allowed))
            raise ImportRefused(f"tensor {name} has shape {tensor.shape}, it should be {words}")
        if tensor.dtype not in dtypes:
            raise ImportRefused(f"tensor {name} is {tensor.dtype}; allowed: {', '.join(dtypes)}")
        return tensor
