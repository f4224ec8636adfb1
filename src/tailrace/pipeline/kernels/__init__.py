"""Kernels: one segment in, its companion files out. Plain functions over Arrow that need no Spark."""
