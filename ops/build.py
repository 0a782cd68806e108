"""Compiles the C++ kernels with the system compiler, once per source, processor and compiler.

The libraries live in a cache folder that only this user can write to.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno")
VARIANTS = {
    "native": ("-march=native",),
    "avx2": ("-march=x86-64-v3",),
    "scalar": (),
    "avx512bf16": ("-march=native", "-mavx512bf16"),
    "pairs": ("-march=native", "-DPAIR_DOT=1"),
}
"""Compiler flags of each form of the kernels: `native` is what runs, `avx2` and `scalar` narrow the
vectors, `avx512bf16` adds that instruction set, `pairs` its arithmetic on any processor."""


class BuildError(Exception):
    """The kernels could not be compiled."""


def load(variant: str = "native") -> ctypes.CDLL:
    """The library of that variant, compiled now if the cache lacks it. Raises BuildError."""
    library = compile_library(variant)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"cannot load {library}: {error}") from error


def compile_library(variant: str, sources: Path = SOURCES) -> Path:
    """Path of the compiled library of that variant. Raises BuildError."""
    compiler = _find_compiler()
    openmp = mapped_openmp()
    library = _cache_dir() / f"ops-{variant}-{_digest(compiler, variant, openmp, sources)}.so"
    if not library.exists():
        with _locked(library.parent):
            if not library.exists():
                _compile(compiler, variant, openmp, sources, library)
    _check_ours(library, stat.S_ISREG)
    return library


def _find_compiler() -> str:
    """Absolute path of $CXX, or else of g++ or c++. Raises BuildError."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "c++"]:
        # A relative path would name a file of whatever folder the process was started in.
        if (found := shutil.which(name)) is not None and os.path.isabs(found):
            return found
    where = f"CXX={asked} names none by an absolute path" if asked else "looked for g++ and c++"
    raise BuildError(f"no C++ compiler found ({where})")


def mapped_openmp() -> list[str]:
    """Files of the OpenMP runtimes that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line}
    names = ("libgomp", "libomp", "libiomp")
    return sorted(path for path in paths if Path(path).name.startswith(names))


def _cache_dir() -> Path:
    """A folder that is this user's alone; where none can be kept, a new one for this process."""
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
    """Raises BuildError unless `path` is no link, ours or root's, and no other account can write to
    it: what is loaded from there runs as us."""
    found = path.lstat()
    is_group_ours = found.st_gid in (os.getegid(), *os.getgroups())
    others = stat.S_IWOTH if is_group_ours else stat.S_IWOTH | stat.S_IWGRP
    is_ours = is_kind(found.st_mode) and found.st_uid in (0, os.geteuid())
    if not is_ours or found.st_mode & others:
        raise BuildError(f"{path} is a link or another's, or others may write to it: not used")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Of processes that start together one compiles, and the others have it then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _digest(compiler: str, variant: str, openmp: list[str], folder: Path) -> str:
    """Everything that the compiled code depends on."""
    version = _run([compiler, "--version"])
    parts = [compiler, version, *FLAGS, *VARIANTS[variant], *openmp, _processor()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(folder.iterdir()):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What `-march=native` looks at: the machine's model and instruction sets."""
    keys = ("flags", "Features", "model name", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join(os.uname())
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))


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
        # NOTE: torch brings its own OpenMP runtime; linked first, it is the one that gets used.
        linked = f"{folder}/ops.so"
        runtimes = openmp if len(openmp) == 1 else []
        _run([compiler, *flags, "-shared", *objects, "-Wl,--as-needed", *runtimes, "-o", linked])
        os.replace(linked, library)


def _run(command: list[str]) -> str:
    try:
        # The compiler looks for some of its files in the current folder.
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/")
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout
