"""Command `python -m ops.precompile`: compiles the C++ kernels into the installed package, one
library per instruction set, so that an image needs no compiler."""

from __future__ import annotations

import sys

# The libraries are linked to its OpenMP runtime.
import torch  # noqa: F401  # pyright: ignore[reportUnusedImport]

from ops.build import COMPILED, BuildError, precompile


def main() -> None:
    try:
        made = precompile(COMPILED)
    except BuildError as error:
        sys.exit(str(error))
    print(*made, sep="\n")


if __name__ == "__main__":
    main()
