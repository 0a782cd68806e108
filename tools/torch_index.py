"""Prints the pip option that makes an installation take PyTorch's CPU build, for the Makefile.

Without an NVIDIA driver the build for CUDA would only take more time and space. `TORCH_INDEX`
names another index, or none with an empty value. An index that does not answer is left out.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from urllib.error import URLError
from urllib.request import urlopen

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TIMEOUT_S = 10.0


def main() -> None:
    # Elsewhere the build on PyPI is the one for CPUs.
    is_linux = platform.system() == "Linux"
    default = CPU_INDEX if is_linux and shutil.which("nvidia-smi") is None else ""
    index = os.environ.get("TORCH_INDEX", default).rstrip("/")
    if not index:
        return
    try:
        urlopen(f"{index}/torch/", timeout=TIMEOUT_S).close()
    except (URLError, OSError, ValueError) as error:
        print(f"{index} does not answer ({error}): pip chooses PyTorch's build", file=sys.stderr)
        return
    print(f"--extra-index-url {index}")


if __name__ == "__main__":
    main()
