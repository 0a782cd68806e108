"""A LoRA from files to a batched `y += x A B`."""
