"""LoRA adapters: file format, validation, store, and the pool that loads them to the device."""
