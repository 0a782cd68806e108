"""Processes with limits on memory and time, which process untrusted input."""
