"""Finds the C++ kernels' libraries, which are shipped with the package or compiled on demand.

The system compiler compiles a library once per source, variant and compiler. Each variant is
compiled for one instruction set; `ops.processor` selects the fastest. Shipped libraries are in
`ops/compiled/`; `ops.precompile` builds them for images without a compiler. Libraries compiled on
demand are stored in a cache folder that only this user can write to.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ops.processor import REQUIRED

SOURCES = Path(__file__).parent / "native"
COMPILED = Path(__file__).parent / "compiled"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno")
# Flags are listed because GCC before version 11 lacks -march=x86-64-v3 and -march=x86-64-v4.
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
VARIANTS = {
    "amx": (*_AVX512, "-mavx512bf16", "-DTILES=1", "-DAMX=1"),
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "scalar": (),
    "tiles": ("-DTILES=1",),
}
"""Compiler flags of each variant. `tiles` gives the results of `amx` on any processor."""


class BuildError(Exception):
    """Raised if the kernels cannot be compiled or loaded, if another account could have written the
    library, or if the library fails its self-check."""


def find_library(variant: str) -> Path | None:
    """Returns the library that `kernel_library.load` would load, or None if it would have to
    compile one. Raises BuildError."""
    if (shipped := find_shipped(variant)) is not None:
        return shipped
    compiled = _cache_dir() / _compiled_name(find_compiler(), variant, mapped_openmp(), SOURCES)
    return compiled if compiled.exists() else None


def find_shipped(variant: str, folder: Path = COMPILED, sources: Path = SOURCES) -> Path | None:
    """Returns the shipped library of a variant, or None if there is none for these sources.

    Raises BuildError if another account could have written it.
    """
    library = folder / shipped_name(variant, sources)
    if not library.exists():
        return None
    _check_ours(library, stat.S_ISREG)
    return library


def shipped_name(variant: str, sources: Path = SOURCES) -> str:
    """Returns the file name of a shipped library, which depends on the sources, the flags, the
    OpenMP runtime and the machine's architecture."""
    runtimes = [Path(runtime).name for runtime in mapped_openmp()]
    parts = [*FLAGS, *VARIANTS[variant], *runtimes, platform.machine()]
    return f"ops-{variant}-{_digest(parts, sources)}.so"


def precompile(folder: Path, sources: Path = SOURCES) -> list[Path]:
    """Compiles all libraries to ship for this machine's architecture. Raises BuildError."""
    compiler, openmp = find_compiler(), mapped_openmp()
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for variant in REQUIRED if is_x86 else ("scalar", "tiles"):
        made.append(folder / shipped_name(variant, sources))
        _compile(compiler, variant, openmp, sources, made[-1])
    return made


def compile_library(variant: str, sources: Path = SOURCES) -> Path:
    """Returns the path of the variant's library, compiling it if needed. Raises BuildError."""
    compiler = find_compiler()
    openmp = mapped_openmp()
    library = _cache_dir() / _compiled_name(compiler, variant, openmp, sources)
    if not library.exists():
        with _locked(library.parent):
            if not library.exists():
                _compile(compiler, variant, openmp, sources, library)
    _check_ours(library, stat.S_ISREG)
    return library


def _compiled_name(compiler: str, variant: str, openmp: list[str], sources: Path) -> str:
    version = _run([compiler, "--version"])
    parts = [compiler, version, *FLAGS, *VARIANTS[variant], *openmp, platform.machine()]
    return f"ops-{variant}-{_digest(parts, sources)}.so"


def find_compiler() -> str:
    """Returns the absolute path of the compiler $CXX if set, or else of g++ or c++. Raises
    BuildError if there is none."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "c++"]:
        # A relative path would name a file in whatever folder the process was started in.
        if (found := shutil.which(name)) is not None and os.path.isabs(found):
            return found
    where = f"CXX={asked} names none by an absolute path" if asked else "looked for g++ and c++"
    raise BuildError(f"no C++ compiler found ({where})")


def mapped_openmp() -> list[str]:
    """Returns the paths of the OpenMP runtimes that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line}
    names = ("libgomp", "libomp", "libiomp")
    return sorted(path for path in paths if Path(path).name.startswith(names))


def _cache_dir() -> Path:
    """Returns a folder that only this user can write to, or else a new temporary one."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "loraplex" / "ops"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (folder.parent, folder):
            _check_ours(each, stat.S_ISDIR)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="loraplex-ops-"))
    return folder


def _check_ours(path: Path, is_kind: Callable[[int], bool]) -> None:
    """Raises BuildError if `path` is a link, does not belong to this user or root, or can be
    written by another account. Code that is loaded from `path` runs as this user."""
    found = path.lstat()
    is_group_ours = found.st_gid in (os.getegid(), *os.getgroups())
    others = stat.S_IWOTH if is_group_ours else stat.S_IWOTH | stat.S_IWGRP
    is_ours = is_kind(found.st_mode) and found.st_uid in (0, os.geteuid())
    if not is_ours or found.st_mode & others:
        raise BuildError(f"{path} is a link or another's, or others may write to it: not used")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, so that only one of several processes compiles the library."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _digest(parts: Sequence[str], folder: Path) -> str:
    """Returns a hex digest of the parts and the source files."""
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(folder.iterdir()):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _compile(
    compiler: str, variant: str, openmp: list[str], source_folder: Path, library: Path
) -> None:
    flags = [*FLAGS, *VARIANTS[variant]]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        sources = sorted(source_folder.glob("*.cpp"))
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", target]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        # NOTE: torch brings its own OpenMP runtime. It is linked first, so that kernels use it.
        linked = f"{folder}/ops.so"
        runtimes = openmp if len(openmp) == 1 else []
        _run([compiler, *flags, "-shared", *objects, "-Wl,--as-needed", *runtimes, "-o", linked])
        os.replace(linked, library)


def _run(command: list[str]) -> str:
    try:
        # The compiler searches for some of its files in the current folder.
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout
