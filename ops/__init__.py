"""Kernels behind one protocol (`ops.base`), which each backend implements."""
