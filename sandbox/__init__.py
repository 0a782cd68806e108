"""Processes with limits, for work on input that strangers sent."""
