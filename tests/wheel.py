"""The product as a wheel built from this tree, in an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.preloaded import ROOT

LEFT_OUT = (".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", "build", "tests")


def install_wheel(folder: Path) -> Path:
    """Builds the wheel and installs it without its dependencies, which are those of the running
    interpreter. Returns the path of its `loraplex` command."""
    tree, wheels, home = folder / "tree", folder / "wheels", folder / "venv"
    # A build writes into the tree that it builds.
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", f"--wheel-dir={wheels}"]
    subprocess.run([*pip, "wheel", *options, str(tree)], check=True)
    (wheel,) = wheels.glob("loraplex-*.whl")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    options = ["--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, f"--python={python}", "install", *options], check=True)
    # A folder named by a .pth file is searched, but the .pth files in it are not read: so nothing
    # leads back to this checkout.
    packages = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "loraplex"
