"""Benchmarks of the product and its parts. None of them is a test."""
