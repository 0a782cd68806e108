"""Ranks the variants of the C++ kernels for a processor, and counts the cores of cgroup quotas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
REQUIRED: dict[str, frozenset[str]] = {
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": _AVX2,
    "scalar": frozenset(),
    "tiles": frozenset(),
}
"""Instruction sets that each variant of the kernels needs, as Linux names them. On a processor
other than x86, `scalar` is compiled for the baseline instruction set, on ARM with NEON."""


@dataclass(frozen=True, slots=True)
class Processor:
    """Vendor and instruction sets of a processor as in /proc/cpuinfo; both empty if unknown."""

    vendor: str = ""
    features: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, cpuinfo: str) -> Processor:
        """Returns the first processor in a text of /proc/cpuinfo."""
        fields: dict[str, str] = {}
        for line in cpuinfo.splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
        return cls(fields.get("vendor_id", ""), frozenset(fields.get("flags", "").split()))

    @classmethod
    def here(cls) -> Processor:
        """Returns this machine's processor, or an unknown one on systems other than Linux."""
        try:
            return cls.parse(Path("/proc/cpuinfo").read_text())
        except OSError:
            return cls()

    def variants(self) -> list[str]:
        """Returns the variants that run on the processor, the fastest first.

        `tiles` is last, because it imitates the instructions of `amx` in plain C++.
        """
        runnable = [variant for variant, needed in REQUIRED.items() if needed <= self.features]
        if self.vendor != "AuthenticAMD" and "avx512bf16" in runnable:
            # On Intel's processors `vdpbf16ps` is about a third slower than float32 arithmetic, so
            # avx512 comes first (100 against 147 to 165 GFLOP/s per core of Sapphire Rapids). On
            # Zen 4 and 5 `vdpbf16ps` is nearly twice as fast (190 against 100 per core of Zen 4).
            runnable.remove("avx512bf16")
            runnable.insert(runnable.index("avx512") + 1, "avx512bf16")
        return runnable


def describe_unpacking(variant: str) -> str:
    """Returns where a variant's kernels unpack quantised weights, and why."""
    if variant in ("amx", "tiles"):
        return "unpacked into the first-level cache, just before each product on tiles"
    rows = {"avx2": "1 row, or 2 of 8-bit weights", "scalar": "1 row"}.get(variant, "8 rows")
    return f"unpacked in registers up to {rows}, in the first-level cache if more sums fill these"


def quota_cores(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the number of cores that the `cpu.max` of this process's control groups (version 2)
    allows, rounded up, or None if they set no limit."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((Path(line[3:]) for line in lines if line.startswith("0::/")), Path("/"))
    quotas = [_quota(groups / group.relative_to("/")) for group in (path, *path.parents)]
    cores = min((quota for quota in quotas if quota is not None), default=None)
    return None if cores is None else max(1, math.ceil(cores))


def _quota(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
