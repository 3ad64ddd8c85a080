"""Compiles our kernels for accelerators that are not here; see aot.py."""
