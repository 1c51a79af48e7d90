"""Compile: builds the native library of a program, in the background.

Reading order: key, lower (with scalars, update and fused), symbolic, inductor, worker, builder, cache.
"""
