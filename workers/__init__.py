"""Worker processes, one per device, with their engines, schedulers and models."""
