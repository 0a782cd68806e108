from __future__ import annotations

from pathlib import Path

import pytest

from ops.processor import REQUIRED, Processor

AVX2 = "fpu sse sse2 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
BF16 = f"{AVX512} avx512_vnni avx512_bf16"
AMX = f"{BF16} amx_bf16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        pytest.param("AuthenticAMD", BF16, "avx512bf16", id="Zen 4 and 5"),
        pytest.param("AuthenticAMD", AVX2, "avx2", id="Zen 1 to 3"),
        pytest.param("GenuineIntel", AMX, "amx", id="Sapphire Rapids and later"),
        pytest.param("GenuineIntel", BF16, "avx512", id="Cooper Lake"),
        pytest.param("GenuineIntel", AVX512, "avx512", id="Skylake-SP, Ice Lake"),
        pytest.param("GenuineIntel", AVX2, "avx2", id="Haswell, Alder Lake"),
        pytest.param("GenuineIntel", AVX2.replace(" fma", ""), "scalar", id="AVX2 without FMA"),
        pytest.param("GenuineIntel", "fpu sse sse2", "scalar", id="Nehalem"),
        pytest.param("HygonGenuine", AVX2, "avx2", id="another vendor"),
        pytest.param("", "", "scalar", id="unknown"),
    ],
)
def test_the_fastest_variant_of_a_processor(vendor: str, flags: str, expected: str) -> None:
    first, second = f"vendor_id\t: {vendor}\nflags\t\t: {flags}\n", "flags\t\t: fpu\n"
    processor = Processor.parse(f"processor\t: 0\n{first}\nprocessor\t: 1\n{second}")
    variants = processor.variants()
    assert variants[0] == expected and variants[-2:] == ["scalar", "tiles"]
    assert set(variants) == {name for name in REQUIRED if REQUIRED[name] <= set(flags.split())}


def test_an_arm_processor_runs_the_scalar_variant() -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\nCPU part\t: 0xd4f\n"
    assert Processor.parse(text).variants() == ["scalar", "tiles"]


def test_this_processor_is_read_from_linux() -> None:
    assert Path("/proc/cpuinfo").exists()
    assert Processor.here() == Processor.parse(Path("/proc/cpuinfo").read_text())
