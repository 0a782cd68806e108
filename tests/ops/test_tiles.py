"""The kernels of `amx`, instruction by instruction, against the same sums in plain C++.

On an x86-64 processor without AMX the compiled kernels run on an emulator of its instructions.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops import build, kernel_library
from ops.base import FusedLinear
from ops.block_matrix import Weight
from ops.cpu import CpuOps
from ops.kernel_library import load, open_library
from ops.panel_linear import PanelLinear
from ops.processor import Processor
from ops.weight_format import BLOCK_SIZES, WeightFormat
from tests.ops.conftest import TILES, backend
from tests.ops.test_attention import LONG, Case, run
from tests.ops.test_block_matrix import random_blocks
from tests.ops.test_lora import LAYER, make_lora

EMULATOR = Path(__file__).parent / "tile_emulator.cpp"
HAS_AMX = "amx" in Processor.here().variants()

pytestmark = pytest.mark.skipif(
    not TILES or platform.machine() != "x86_64", reason="AMX is compiled for x86-64 by g++"
)
emulated_only = pytest.mark.skipif(HAS_AMX, reason="this processor has AMX: nothing is emulated")


def emulated(folder: Path) -> Path:
    """Compiles kernels of `amx` together with the emulator. Their other instructions are those of
    this processor's fastest variant."""
    for path in build.SOURCES.iterdir():
        shutil.copy(path, folder)
    shutil.copy(EMULATOR, folder / "tile_permission.cpp")
    flags = build.VARIANTS[Processor.here().variants()[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build.VARIANTS, "amx", (*flags, "-DTILES=1", "-DAMX=1"))
        return build.compile_library("amx", folder)


@pytest.fixture(scope="module")
def amx(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if HAS_AMX:
        return load("amx")
    library = open_library(emulated(tmp_path_factory.mktemp("sources")))
    library.emulated_products.restype = ctypes.c_int64
    assert library.check_tiles() == 0
    library.set_num_threads(2)
    return library


@pytest.fixture
def released(amx: ctypes.CDLL) -> Iterator[None]:
    """Checks that products were emulated and that no thread keeps its tiles configured."""
    before = 0 if HAS_AMX else amx.emulated_products()
    yield
    if not HAS_AMX:
        assert amx.emulated_products() > before and amx.configured_threads() == 0


def multiply(library: ctypes.CDLL, x: Tensor, weights: list[Weight], bias: Tensor | None) -> Tensor:
    packed = PanelLinear(library, weights, bias)
    y = torch.full((len(x), packed.out_features), torch.nan)
    library.linear(
        *(x.data_ptr(), *x.shape, packed.parts, packed.num_parts, packed.bias_ptr),
        *(packed.out_features, y.data_ptr()),
    )
    return y


def ops_of(library: ctypes.CDLL) -> CpuOps:
    """Returns ops that call this library's kernels."""
    ops = copy(backend("tiles"))
    assert isinstance(ops, CpuOps)
    ops._lib = library  # pyright: ignore[reportPrivateUsage]
    return ops


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 70])
@pytest.mark.parametrize(("depth", "columns"), [(32, 48), (7, 5), (63, 130), (320, 97)])
def test_linears_have_the_bits_of_the_same_sums_in_plain_cpp(
    amx: ctypes.CDLL, released: None, rows: int, depth: int, columns: int
) -> None:
    torch.manual_seed(rows * depth + columns)
    tiles = backend("tiles")
    assert isinstance(tiles, CpuOps)
    x, weight = torch.randn(rows, depth), torch.randn(columns, depth)
    bias = torch.randn(columns) if rows % 2 else None
    # Products of the last are around the smallest normal number.
    for scale in (1.0, 2.0**-63):
        narrow = (weight * scale).bfloat16()
        got = multiply(amx, x * scale, [narrow], bias)
        expected = tiles.linear(x * scale, tiles.pack_linear(narrow, bias=bias))
        assert torch.equal(bits(got), bits(expected))
        if bias is None:
            assert got.abs().max() > 0


@pytest.mark.parametrize("rows", [1, 40])
def test_quantised_linears_have_the_bits_of_their_bfloat16_form(
    amx: ctypes.CDLL, released: None, rows: int
) -> None:
    weights = [random_blocks(format, 50, 1, format) for format in BLOCK_SIZES]
    for weight in weights:
        x = torch.randn(rows, weight.shape[1])
        got, expected = (multiply(amx, x, [w], None) for w in (weight, weight.dequantize()))
        assert torch.equal(bits(got), bits(expected))
    same_depth = [w for w in weights if w.format in (WeightFormat.Q8_0, WeightFormat.Q4_0)]
    x = torch.randn(rows, same_depth[0].shape[1])
    mixed = [*same_depth, same_depth[0].dequantize()]
    got = multiply(amx, x, list(mixed), None)
    expected = torch.cat([multiply(amx, x, [each], None) for each in mixed], dim=1)
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("depth", [64, 75])
@pytest.mark.parametrize(
    "rows", [[1], [1, 1, 3], [16, 17], [0, 33, 140], [1] * 20], ids=lambda rows: f"{len(rows)}"
)
def test_lora_has_the_bits_of_the_same_sums_in_plain_cpp(
    amx: ctypes.CDLL, released: None, rows: list[int], depth: int
) -> None:
    """For one and for several segments to a tile, and any rank and width."""
    torch.manual_seed(len(rows) * depth)
    tiles, fused = backend("tiles"), FusedLinear((0, 1, 2), (40, 64, 300), depth)
    ranks = [[8, 64, 0], [12, 1, 40]]
    slots = [number % 2 for number in range(len(rows))]
    lora, _ = make_lora(tiles, fused, ranks, torch.bfloat16, rows, slots)
    x = torch.randn(sum(rows) + 2, depth)
    expected = torch.randn(len(x), sum(fused.widths))
    got = expected.clone()
    tiles.add_lora(expected, x, fused, LAYER, lora)
    ops_of(amx).add_lora(got, x, fused, LAYER, lora)
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize(
    "case",
    [
        replace(LONG, dim=48),
        replace(LONG, cached=[40, 2], fresh=[70, 1], num_heads=4, num_kv=2, dim=16),
        replace(LONG, cached=[600], fresh=[1], dim=80, window=20, softcap=30.0, sinks=True),
    ],
    ids=lambda case: f"{case.dim}",
)
def test_attention_is_what_the_formula_gives(amx: ctypes.CDLL, released: None, case: Case) -> None:
    """The self-check compares bits. Those of the library of `tiles` differ, because other vector
    instructions compute its softmax."""
    got, expected = run(ops_of(amx), replace(case, dtype=torch.bfloat16))
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)


@emulated_only
@pytest.mark.parametrize(("refusing", "wrong", "result"), [(1, 0, 1), (0, 1, 2), (0, 0, 0)])
def test_the_self_check_finds_refused_and_wrong_tiles(
    amx: ctypes.CDLL, refusing: int, wrong: int, result: int
) -> None:
    amx.set_faults(refusing, wrong)
    try:
        assert amx.check_tiles() == result
    finally:
        amx.set_faults(0, 0)


@emulated_only
def test_a_library_that_fails_its_check_is_not_loaded(amx: ctypes.CDLL, monkeypatch) -> None:
    monkeypatch.setattr(kernel_library, "find_shipped", lambda _: Path(amx._name))
    try:
        for faults, words in (((1, 0), "system does not let"), ((0, 1), "do not give the bits")):
            amx.set_faults(*faults)
            with pytest.raises(build.BuildError, match=f"^amx cannot be used: .*{words}"):
                load("amx")
    finally:
        amx.set_faults(0, 0)
    assert load("amx").check_tiles() == 0
