"""Weight files that are damaged or made to hurt: refused by name, in bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.store.folder import LocalStore
from tests.doubles import make_model
from tests.workers.tiny_gguf import write_gguf
from workers.importer import ImportRefused, import_model
from workers.importer.gguf_header import MAX_ITEMS, check_gguf
from workers.models.checkpoint import CheckpointError
from workers.models.spec import UnsupportedModel

STRING, ARRAY, UINT32, UINT8 = 8, 9, 4, 0


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, length: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + items


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def header(num_tensors: int, num_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


MALFORMED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes"),
    "another format": (b"PK\3\4" + bytes(40), "begin with GGUF"),
    "cut in the counts": (b"GGUF" + struct.pack("<IQ", 3, 0) + bytes(7), "23 bytes"),
    "another version": (header(0, 0, version=99), "version 99"),
    "another byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    "absurd count of tensors": (header(1 << 63, 0), "9223372036854775808 tensors"),
    "absurd count of keys": (header(0, 1 << 62), "metadata keys"),
    "keys that are not there": (header(0, 7), "cut short"),
    "huge key": (header(0, 1, struct.pack("<Q", 1 << 50)), "a metadata key has"),
    "huge string": (header(0, 1, key(b"a", STRING, struct.pack("<Q", 1 << 40))), "'a' has"),
    "string beyond the file": (header(0, 1, key(b"a", STRING, struct.pack("<Q", 99))), "cut"),
    "unknown type": (header(0, 1, key(b"a", 77, b"")), "unknown type 77"),
    "array of 2^60 numbers": (header(0, 1, key(b"a", ARRAY, array(UINT8, 1 << 60))), "elements"),
    "array of 2^60 texts": (header(0, 1, key(b"a", ARRAY, array(STRING, 1 << 60))), "elements"),
    "array of 2^60 arrays": (header(0, 1, key(b"a", ARRAY, array(ARRAY, 1 << 60))), "elements"),
    "array beyond the file": (header(0, 1, key(b"a", ARRAY, array(UINT32, 1000))), "cut short"),
    "arrays without an end": (
        header(0, 1, key(b"a", ARRAY, array(ARRAY, 1) * 5000)),
        "arrays in arrays",
    ),
    "many arrays": (
        header(
            0,
            3,
            b"".join(
                key(bytes([n]), ARRAY, array(0, MAX_ITEMS // 2)) + bytes(MAX_ITEMS // 2)
                for n in range(3)
            ),
        ),
        "in all arrays",
    ),
    "key twice": (header(0, 2, key(b"a", UINT8, b"1") * 2), "there twice"),
    "alignment 0": (header(0, 1, key(b"general.alignment", UINT32, bytes(4))), "power of two"),
    "alignment as text": (header(0, 1, key(b"general.alignment", STRING, text(b"32"))), "number"),
    "tensor beyond the file": (header(1, 0, tensor(b"t", (8, 8))), "cut short"),
    "tensor's size overflows": (header(1, 0, tensor(b"t", (1 << 62, 1 << 62))), "cut short"),
    "tensor's offset overflows": (
        header(1, 0, tensor(b"t", (1,), offset=(1 << 64) - 32)),
        "cut short",
    ),
    "tensor without dimensions": (header(1, 0, tensor(b"t", ())), "0 dimensions"),
    "tensor of 2^32 dimensions": (
        header(1, 0, text(b"t") + struct.pack("<I", (1 << 32) - 1)),
        "dimensions",
    ),
    "tensor without numbers": (header(1, 0, tensor(b"t", (4, 0))), "shape"),
    "half a block": (header(1, 0, tensor(b"t", (33,), kind=8)), "blocks 32"),
    "unknown type of tensor": (header(1, 0, tensor(b"t", (4,), kind=200)), "unknown type 200"),
    "tensors overlap": (
        header(2, 0, tensor(b"t", (64,)) + tensor(b"u", (64,), offset=32)) + bytes(1000),
        "overlap",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_files_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    data, words = MALFORMED[kind]
    (tmp_path / "m.gguf").write_bytes(data)
    started = time.perf_counter()
    with pytest.raises(ImportRefused, match=words):
        import_model(tmp_path / "m.gguf", LocalStore(tmp_path))
    assert time.perf_counter() - started < 10


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("m") / "source", "llama")


METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "2^31 layers": ({"llama.block_count": (1 << 31) - 1}, "block_count"),
    "no heads": ({"llama.attention.head_count": 0}, "ZeroDivisionError"),
    "huge heads": ({"llama.attention.key_length": (1 << 31) - 1}, "key_length|allowed"),
    "tokens as a number": ({"tokenizer.ggml.tokens": 7}, "tokens"),
    "scores of one token": ({"tokenizer.ggml.scores": [0.0]}, "1 values of"),
    "merges as numbers": ({"tokenizer.ggml.merges": [1, 2]}, "merges"),
    "merge of one token": ({"tokenizer.ggml.merges": ["a"]}, "merges"),
    "epsilon as text": ({"llama.attention.layer_norm_rms_epsilon": "x"}, "ValueError|epsilon"),
}


@pytest.mark.parametrize("kind", METADATA)
def test_values_of_a_wrong_kind_are_refused(kind: str, source: Path, tmp_path: Path) -> None:
    metadata, words = METADATA[kind]
    path = write_gguf(source, tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ValueError, match=words):
        import_model(path, LocalStore(tmp_path))


def flip(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] = rng.randrange(256)


def cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def widen(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) - 8)
    data[at : at + 8] = rng.choice((b"\xff" * 8, bytes(7) + b"\x10", bytes(8)))


def repeat(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at:at] = data[at : at + rng.randrange(1, 64)]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("change", [flip, cut, widen, repeat])
def test_no_change_of_a_file_ends_otherwise_than_by_name(
    change: Callable[[random.Random, bytearray], None], source: Path, tmp_path: Path
) -> None:
    """Changes in the header, where all counts, sizes and offsets are. Any import ends within
    seconds, and a refusal is no traceback."""
    sound = write_gguf(source, tmp_path / "m.gguf").read_bytes()
    header_bytes = sound.index(b"output_norm.weight") + 200
    rng = random.Random(change.__name__)
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(60):
        data = bytearray(sound[:header_bytes])
        change(rng, data)
        path = tmp_path / "changed.gguf"
        path.write_bytes(bytes(data) + (b"" if change is cut else sound[header_bytes:]))
        started = time.perf_counter()
        try:
            import_model(path, LocalStore(tmp_path / "store"))
        except ValueError:  # ImportRefused, UnsupportedModel and CheckpointError
            refused += 1
        assert time.perf_counter() - started < 10, number
    assert refused > 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "1 GiB"


def test_a_sound_file_passes(source: Path, tmp_path: Path) -> None:
    check_gguf(write_gguf(source, tmp_path / "m.gguf"))


@pytest.mark.parametrize("change", [flip, cut, widen, repeat])
def test_no_change_of_a_safetensors_header_ends_otherwise_than_by_name(
    change: Callable[[random.Random, bytearray], None], source: Path, tmp_path: Path
) -> None:
    sound = (source / "model.safetensors").read_bytes()
    header_bytes = 8 + int.from_bytes(sound[:8], "little")
    shutil.copytree(source, tmp_path / "changed")
    rng = random.Random(change.__name__)
    for number in range(60):
        data = bytearray(sound[:header_bytes])
        change(rng, data)
        rest = b"" if change is cut else sound[header_bytes:]
        (tmp_path / "changed" / "model.safetensors").write_bytes(bytes(data) + rest)
        started = time.perf_counter()
        with contextlib.suppress(ValueError):
            import_model(tmp_path / "changed", LocalStore(tmp_path / "store"))
        assert time.perf_counter() - started < 10, number


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{", "[" * 100_000]
)
def test_an_index_without_shards_is_refused_by_name(
    index: str, source: Path, tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "changed")
    (tmp_path / "changed" / "model.safetensors").unlink()
    (tmp_path / "changed" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        import_model(tmp_path / "changed", LocalStore(tmp_path / "store"))


def test_absurd_numbers_of_layers_are_refused(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "changed")
    config = json.loads((source / "config.json").read_text())
    for model_type in ("llama", "smollm3", "qwen3", "gemma3_text"):
        absurd = config | {"num_hidden_layers": 1 << 60, "model_type": model_type}
        absurd |= {"layer_types": None, "hidden_activation": "gelu_pytorch_tanh"}
        (tmp_path / "changed" / "config.json").write_text(json.dumps(absurd))
        with pytest.raises(UnsupportedModel, match="num_hidden_layers"):
            import_model(tmp_path / "changed", LocalStore(tmp_path / "store"))
