"""Compile: turns recordings into executables, and builds libraries in the background.

Reading order: programs, key, lower (with scalars and fused), worker, builder, cache.
"""
