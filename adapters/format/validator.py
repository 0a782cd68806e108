"""Validates adapters that peft has written. Accepts an adapter if it can be served exactly, and
otherwise raises an error that names the reason. Torch-free.

Reads both files once, in bounded memory. Nothing in them is executed, imported or used as a path.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np
from msgspec.structs import replace

from adapters.errors import AdapterRejected
from adapters.format.binding import (
    AdapterTensors,
    BoundAdapter,
    BoundModule,
    BoundRows,
    bind_any,
)
from adapters.format.configuration import MAX_CONFIG_BYTES, parse_config
from adapters.format.module_list import ListedModule, read_module_list
from adapters.format.patterns import cpu_limit
from adapters.format.tensor_headers import ITEM_BYTES, TensorHeader, read_header
from adapters.manifest import OUTER, AdapterManifest, BaseModelShape

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from numpy.typing import NDArray

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt")
"""Files in pickle format, as older versions of peft wrote them. They are refused, and the error
names the file."""
CHUNK_BYTES = 4 << 20
DIGEST_TAG = b"loraplex adapter 1\0"

LARGEST = 65504
"""Maximum magnitude of a tensor's value, which is the largest float16. Larger values occur if the
training has diverged."""
LARGEST_BITS = {
    "F32": int(np.float32(LARGEST).view(np.uint32)),
    "F16": int(np.float16(LARGEST).view(np.uint16)),
    "BF16": int(np.float32(LARGEST).view(np.uint32)) >> 16,
}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The two files of an adapter version."""

    config: Path
    weights: Path

    @classmethod
    def in_folder(cls, folder: Path) -> AdapterFiles:
        return cls(folder / CONFIG_NAME, folder / WEIGHTS_NAME)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an uploaded adapter."""

    max_rank: int = 128
    max_file_bytes: int = 1 << 30
    max_image_bytes: int = 1 << 30
    """Maximum bytes of the packed image in bfloat16."""
    matching_cpu_s: float | None = None
    """Maximum seconds of CPU time to match the patterns of the adapter's configuration. None means
    no limit. A limit works only in the main thread of a process."""


MAX_STORED_BYTES = 1 << 40

IMAGE_ALIGNMENT = 64
"""Alignment in bytes of each matrix in a packed image, equal to the size of a cache line and of the
largest vector register."""
ID_BYTES = 4
"""Bytes of a token id in a packed image."""


class Validated(msgspec.Struct, frozen=True, tag=True):
    """Result of validating an adapter that can be served."""

    manifest: AdapterManifest
    modules: tuple[ListedModule, ...]

    def warning(self, *warnings: str) -> Validated:
        """Returns a copy whose manifest has further warnings."""
        together = (*self.manifest.warnings, *warnings)
        return replace(self, manifest=replace(self.manifest, warnings=together))


def validate_and_list(
    files: AdapterFiles, bases: Sequence[BaseModelShape], limits: Limits
) -> Validated:
    """Returns the manifest of a servable adapter, and the list of modules to store. Raises
    AdapterRejected if the adapter cannot be served.

    bases: candidates for the adapter's base model. The tensors must fit exactly one of them.
    """
    raw_config = _read_config(files.config)
    config = parse_config(raw_config)
    with _open(files.weights, limits.max_file_bytes) as (file, file_bytes):
        header = read_header(file, file_bytes)
        with cpu_limit(limits.matching_cpu_s):
            bound = bind_any(config, header.tensors, bases, limits.max_rank)
        _check_image(bound, limits.max_image_bytes)
        digest = _start_digest(raw_config, file_bytes)
        file.seek(0)
        digest.update(file.read(header.data_start))
        zeros = _scan(file, header, digest)
    manifest = _summarise(bound, digest.hexdigest(), len(raw_config) + file_bytes, zeros)
    modules = (ListedModule(each.layer, each.projection, each.scale) for each in bound.modules)
    pickles = [name for name in PICKLE_NAMES if (files.weights.parent / name).exists()]
    ignored = [f"{name}, a pickle beside {WEIGHTS_NAME}, is not used" for name in pickles]
    return Validated(manifest, tuple(modules)).warning(*ignored)


class StoredAdapter(msgspec.Struct, frozen=True):
    """Adapter that was read from the store, with its tensors bound to modules of the base model.
    modules, rows: see `BoundAdapter`."""

    modules: tuple[BoundModule, ...]
    rows: tuple[BoundRows, ...]
    header: TensorHeader


def read_adapter(files: AdapterFiles, base: BaseModelShape) -> StoredAdapter:
    """Checks the header of a stored adapter again and binds its tensors according to its stored
    list of modules. Does not read the tensors' data. Raises AdapterRejected."""
    with _open(files.weights, MAX_STORED_BYTES) as (file, file_bytes):
        header = read_header(file, file_bytes)
    listed = read_module_list(files.config.parent)
    tensors = AdapterTensors(header.tensors, base)
    modules, rows = tensors.bind_listed(listed), ()
    if tensors.replaces_weights:
        rows = tensors.bind_rows(parse_config(_read_config(files.config)))
    return StoredAdapter(modules, rows, header)


def image_bytes(bound: BoundAdapter, item_bytes: int) -> int:
    """Returns the size of the adapter's packed image in a dtype of `item_bytes` bytes."""
    sizes: list[int] = []
    for module in bound.modules:
        name = bound.base.modules(module.layer)[module.projection]
        widths = bound.base.projection_shape(module.layer, name)
        sizes += (width * module.rank * item_bytes for width in widths)
    sizes += (each.count * ID_BYTES for each in bound.rows)
    # A tensor that replaces rows of the embedding and of the output matrix is stored once.
    counts = {each.name: each.count for each in bound.rows}
    sizes += (count * bound.base.hidden_size * item_bytes for count in counts.values())
    return sum(map(aligned, sizes))


def aligned(num_bytes: int) -> int:
    """Returns the next position in an image at which a factor may start."""
    return -(-num_bytes // IMAGE_ALIGNMENT) * IMAGE_ALIGNMENT


def _check_image(bound: BoundAdapter, max_bytes: int) -> None:
    """Raises AdapterRejected for an adapter whose packed image is too large in bfloat16."""
    num_bytes = image_bytes(bound, ITEM_BYTES["BF16"])
    if num_bytes > max_bytes:
        raise AdapterRejected(
            "adapter.image.too_large",
            WEIGHTS_NAME,
            num_bytes,
            max_bytes,
            f"Packed in bfloat16 the adapter takes {num_bytes} bytes of a worker's memory, allowed"
            f" are {max_bytes}: train without modules_to_save or with a smaller r, or have"
            " max_adapter_image raised.",
        )


def content_digest(files: AdapterFiles) -> str:
    """Returns the SHA-256 (hex) over a tag and the two files, each file preceded by its size."""
    with files.weights.open("rb") as file:
        chunks = iter(lambda: file.read(CHUNK_BYTES), b"")
        return digest_chunks(_read_config(files.config), chunks, files.weights.stat().st_size)


def digest_chunks(raw_config: bytes, weights: Iterable[bytes], file_bytes: int) -> str:
    """Returns the `content_digest` of a configuration and of weights in chunks. file_bytes: size of
    the weights."""
    digest = _start_digest(raw_config, file_bytes)
    for chunk in weights:
        digest.update(chunk)
    return digest.hexdigest()


def _start_digest(raw_config: bytes, file_bytes: int) -> Any:
    digest = hashlib.sha256(DIGEST_TAG)
    digest.update(len(raw_config).to_bytes(8, "little") + raw_config)
    digest.update(file_bytes.to_bytes(8, "little"))
    return digest


def _read_config(path: Path) -> bytes:
    with _open(path, MAX_CONFIG_BYTES) as (file, file_bytes):
        raw = file.read(MAX_CONFIG_BYTES + 1)
    if len(raw) != file_bytes:
        raise AdapterRejected("adapter.file.changed", path.name, len(raw), file_bytes)
    return raw


@contextmanager
def _open(path: Path, max_bytes: int) -> Generator[tuple[BinaryIO, int]]:
    """Opens the regular file at `path` and yields the file and its size in bytes. Does not follow a
    symbolic link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _explain_absence(path, error) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise AdapterRejected("adapter.file.kind", path.name, "not a regular file")
    with open(descriptor, "rb") as file:
        if status.st_size > max_bytes:
            raise AdapterRejected("adapter.file.too_large", path.name, status.st_size, max_bytes)
        yield file, status.st_size


def _explain_absence(path: Path, error: OSError) -> AdapterRejected:
    pickles = [n for n in PICKLE_NAMES if (path.parent / n).exists()]
    if path.name == WEIGHTS_NAME and pickles:
        return AdapterRejected("adapter.unsupported.pickle", pickles[0], "a pickle", [WEIGHTS_NAME])
    return AdapterRejected("adapter.file.missing", path.name, os.strerror(error.errno or 0))


def _scan(file: BinaryIO, header: TensorHeader, digest: Any) -> set[str]:
    """Hashes and checks the tensors' data in file order. Returns the names of all-zero tensors."""
    zeros: set[str] = set()
    for name, entry in header.tensors.items():
        left = entry.data_offsets[1] - entry.data_offsets[0]
        largest = 0
        while left:
            chunk = file.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise AdapterRejected("adapter.file.changed", WEIGHTS_NAME, "it became shorter")
            digest.update(chunk)
            left -= len(chunk)
            largest = max(largest, _largest_bits(chunk, entry.dtype))
        if largest > LARGEST_BITS[entry.dtype]:
            raise AdapterRejected(
                "adapter.tensor.not_finite", name, "NaN, infinite or beyond", [-LARGEST, LARGEST]
            )
        if largest == 0:
            zeros.add(name)
    return zeros


def _largest_bits(chunk: bytes, dtype: str) -> int:
    """Returns the largest bit pattern of the values without their sign bits. A larger pattern means
    a larger magnitude. The patterns of infinity and NaN are larger than those of finite values."""
    width = ITEM_BYTES[dtype]
    unsigned: NDArray[np.unsignedinteger[Any]] = np.frombuffer(chunk, f"<u{width}")
    return int((unsigned & ((1 << (8 * width - 1)) - 1)).max())


def _summarise(
    bound: BoundAdapter, digest: str, file_bytes: int, zeros: set[str]
) -> AdapterManifest:
    modules, base = bound.modules, bound.base
    touched = {base.modules(module.layer)[module.projection] for module in modules}
    touched |= {OUTER[each.module] for each in bound.rows}
    reasons = [_reason_for_no_effect(module, zeros) for module in modules]
    idle = [reason for reason in reasons if reason is not None]
    equals_base = len(idle) == len(modules) and not bound.rows
    because = " or ".join(sorted(set(idle)))
    warnings = list(bound.warnings)
    if equals_base:
        warnings.append(
            f"the version equals its base model, because {because}:"
            " it does not become prod by itself"
        )
    elif idle:
        warnings.append(
            f"{len(idle)} of {len(modules)} adapted modules equal the base's, because {because}"
        )
    for each in bound.rows:
        if each.tokens is None:
            num_bytes = each.count * base.hidden_size * ITEM_BYTES["BF16"]
            warnings.append(
                f"the version has {OUTER[each.module]} of its own, which takes {num_bytes} bytes"
                " of a worker's memory in bfloat16"
            )
    tensors = {m.a_name: m.a for m in modules} | {m.b_name: m.b for m in modules}
    tensors |= {each.name: each.entry for each in bound.rows}
    names = (*base.projections, *OUTER)
    shapes = [entry.shape for entry in tensors.values()]
    return AdapterManifest(
        digest=digest,
        base_digest=base.digest,
        max_rank=max(module.rank for module in modules),
        num_parameters=sum(rows * columns for rows, columns in shapes),
        file_bytes=file_bytes,
        projections=tuple(name for name in dict.fromkeys(names) if name in touched),
        layers=tuple(sorted({m.layer for m in modules if m.layer < base.num_layers})),
        warnings=tuple(warnings),
        equals_base=equals_base,
        invocation_tokens=bound.invocation_tokens,
    )


def _reason_for_no_effect(module: BoundModule, zeros: set[str]) -> str | None:
    """Returns the reason why the product B A of the module is zero, or None if it is not zero."""
    if module.scale == 0:
        return "lora_alpha (or its alpha_pattern) is 0"
    if module.b_name in zeros:
        return "lora_B is zero"
    return "lora_A is zero" if module.a_name in zeros else None
