"""Compile: builds the native library of a program, in the background.

Reading order: key, lower (with scalars, update, fused, grad_scaling and collectives), symbolic, inductor,
worker, builder, cache.
"""
