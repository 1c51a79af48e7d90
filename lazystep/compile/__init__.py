"""Compile: builds the native library of a program, in the background.

Reading order: key, lower (with scalars, update, fused and grad_scaling), symbolic, inductor, worker, builder,
cache.
"""
