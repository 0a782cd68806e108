"""One process per device: engines, scheduler, models."""
