"""Command `python -m ops.precompile`: compiles the C++ kernels into the installed package, one
library per instruction set, so that an image needs no compiler."""

from __future__ import annotations

import sys

# Loads torch's OpenMP runtime, to which the libraries are linked.
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
