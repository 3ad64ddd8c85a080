"""Benchmarks: what is timed against what, and how it is told."""
