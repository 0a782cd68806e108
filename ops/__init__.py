"""Kernels, with one protocol (`ops.base`) and one implementation per backend."""
