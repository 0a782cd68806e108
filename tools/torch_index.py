"""Prints the pip option by which the Makefile installs the CPU build of PyTorch.

On a machine without an NVIDIA driver, the CUDA build would only need more time and space. The
variable `TORCH_INDEX` sets another package index, or none if it is empty. If the index does not
answer, no option is printed.
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
    # On other systems, PyPI already has the CPU build.
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
