from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ops import build
from ops.kernel_library import SIGNATURES, load
from ops.processor import REQUIRED, Processor
from ops.registry import select
from tests.ops.conftest import VARIANTS


def some_sources(folder: Path, *names: str) -> Path:
    """The kernels' headers and a few of their files: quick to compile."""
    folder.mkdir()
    for path in (*build.SOURCES.glob("*.h"), *(build.SOURCES / name for name in names)):
        shutil.copy(path, folder)
    return folder


def test_the_library_is_compiled_once_into_a_private_folder(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = some_sources(tmp_path / "sources", "threads.cpp")
    library = build.compile_library("scalar", sources)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    written = library.stat().st_mtime_ns
    assert build.compile_library("scalar", sources) == library
    assert library.stat().st_mtime_ns == written
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    (sources / "threads.cpp").write_text("// changed\n")
    assert build.compile_library("scalar", sources) != library


def test_those_who_start_together_compile_once(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec g++ "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    sources = some_sources(tmp_path / "sources", "threads.cpp")
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: build.compile_library("scalar", sources), range(4)))
    assert len(set(made)) == 1 and made[0].exists()
    assert calls.read_text().count(" -shared ") == 1


def test_a_library_is_found_once_it_is_compiled(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = some_sources(tmp_path / "sources", "threads.cpp")
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build.find_library("scalar") is None
    assert build.compile_library("scalar", sources) == build.find_library("scalar")


@pytest.mark.full
@pytest.mark.parametrize("variant", ["avx512bf16", "amx"])
def test_the_bfloat16_instructions_compile(monkeypatch, tmp_path: Path, variant: str):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if os.uname().machine != "x86_64":
        pytest.skip("instructions of x86-64")
    if variant in Processor.here().variants():
        pytest.skip("this processor has them: every other test of the kernels compiles them")
    tiles = [path.name for path in build.SOURCES.glob("tile_*.cpp")]
    sources = some_sources(tmp_path / "sources", "linear.cpp", "threads.cpp", *tiles)
    assert build.compile_library(variant, sources).exists()


@pytest.mark.skipif(not VARIANTS, reason="no C++ compiler")
@pytest.mark.parametrize("variant", VARIANTS[:1])
def test_a_loaded_library_has_the_types_of_its_functions(variant: str) -> None:
    """Else pointers would be cut to 32 bits."""
    library = load(variant)
    for name, arguments in SIGNATURES.items():
        assert getattr(library, name).argtypes == arguments


def test_a_cache_that_others_can_write_to_is_refused(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "loraplex" / "ops"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(build.BuildError, match="others may write"):
        build.compile_library("scalar")


def test_a_link_in_place_of_the_cache_or_of_a_library_is_refused(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = some_sources(tmp_path / "sources", "threads.cpp")
    library = build.compile_library("scalar", sources)
    planted = library.rename(tmp_path / "planted.so")
    library.symlink_to(planted)
    with pytest.raises(build.BuildError, match="is a link"):
        build.compile_library("scalar", sources)
    moved = (tmp_path / "cache" / "loraplex").rename(tmp_path / "elsewhere")
    (tmp_path / "cache" / "loraplex").symlink_to(moved)
    with pytest.raises(build.BuildError, match="is a link"):
        build.compile_library("scalar", sources)


def test_a_compiler_of_the_current_folder_is_not_run(monkeypatch, tmp_path: Path):
    (tmp_path / "c++").write_text("#!/bin/sh\ntouch ran\n")
    (tmp_path / "c++").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./c++")
    with pytest.raises(build.BuildError, match="absolute path"):
        build.compile_library("scalar")
    assert not (tmp_path / "ran").exists()


def test_without_a_compiler_the_reference_serves_with_one_warning(monkeypatch, tmp_path: Path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler") as caught:
        ops = select("cpu")
    assert ops.name == "reference" and len(caught) == 1


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(build.BuildError, match="/bin/false"):
        build.compile_library("scalar")


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="'tpu'"):
        select("tpu")


def test_one_openmp_runtime_is_loaded():
    select("cpu")
    assert torch.get_num_threads() >= 1
    assert len(build.mapped_openmp()) == 1


def test_a_shipped_library_is_of_these_sources_and_ours(tmp_path: Path) -> None:
    sources, folder = some_sources(tmp_path / "sources", "threads.cpp"), tmp_path / "compiled"
    assert build.find_shipped("scalar", folder, sources) is None
    made = build.precompile(folder, sources)
    variants = list(REQUIRED) if platform.machine() == "x86_64" else ["scalar", "tiles"]
    assert [build.find_shipped(each, folder, sources) for each in variants] == made
    assert ctypes.CDLL(str(made[-1])).set_num_threads
    made[-1].chmod(0o666)
    with pytest.raises(build.BuildError, match="others may write"):
        build.find_shipped(variants[-1], folder, sources)
    (sources / "threads.cpp").write_text("")
    assert build.find_shipped("scalar", folder, sources) is None
