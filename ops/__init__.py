"""Kernels: one protocol (`ops.base`) and one implementation per backend."""
