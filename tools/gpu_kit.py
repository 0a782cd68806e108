"""`python -m tools.gpu_kit`: fills the folder `.gpu` with wheels and compiled kernels, so that
`benchmarks.gpu_report` can run on a GPU machine without network.

The folder is for one version of Python and of Triton on Linux x86-64, and for sm_90 (H100, H200).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("msgspec", "prometheus-client", "llguidance", "pytest-asyncio"),
    *("cryptography", "cffi", "pycparser", "tokenizers"),
)
"""Packages that workers and their tests need and that images for training usually lack. The wheels
have the versions that are installed on this machine."""
GLIBC = range(17, 36)
"""Minor versions of glibc whose manylinux wheels are allowed. They run on machines with glibc 2.35
or later."""
MAX_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu", help="default: .gpu")
    parser.add_argument("--python", default="3.12", help="version there; default: 3.12")
    parser.add_argument("--triton", default="3.6.0", help="version there; default: 3.6.0")
    parser.add_argument(
        "--interpreter", help="a Python of that version here, for the kernels; default: pythonX.Y"
    )
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    download_wheels(options.python, options.out / "wheels")
    interpreter = options.interpreter or f"python{options.python}"
    if can_run(interpreter):
        compile_kernels(interpreter, options.triton, options.out / "kernels")
    else:
        print(f"no kernels: {interpreter} does not run here; the GPU machine will compile them")
    num_bytes = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{options.out}: {num_bytes / (1 << 20):.1f} MiB")
    if num_bytes > MAX_BYTES:
        sys.exit(f"the folder is larger than {MAX_BYTES >> 20} MiB")


def download_wheels(python: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    command += ["--platform=manylinux2014_x86_64"]
    packages = [f"{name}=={version(name)}" for name in PACKAGES]
    subprocess.run([*command, "--dest", str(folder), *packages], check=True)


def can_run(interpreter: str) -> bool:
    try:
        return subprocess.run([interpreter, "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def compile_kernels(interpreter: str, triton: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        forms, site = Path(scratch, "forms.json"), Path(scratch, "site")
        with forms.open("w") as file:
            command = [sys.executable, "-m", "tools.kernel_forms"]
            subprocess.run(command, cwd=ROOT, stdout=file, check=True)
        install = [interpreter, "-m", "pip", "install", "--quiet", "--root-user-action=ignore"]
        install += [
            "--no-deps",
            "--no-compile",
            "--target",
            str(site),
            f"triton=={triton}",
            "numpy",
        ]
        subprocess.run(install, check=True)
        command = [interpreter, "-m", "tools.compile_forms", str(forms), str(folder)]
        environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    main()
