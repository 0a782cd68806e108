"""The kernel seam: one protocol (`ops.base`), one implementation per backend."""
