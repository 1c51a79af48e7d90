"""Compile: builds the native library of a program, in the background.

Reading order: key, lower (with scalars, update, fused, grad_scaling, bias, bounds and collectives),
symbolic, inductor, compilers, worker, builder, cache.
"""
