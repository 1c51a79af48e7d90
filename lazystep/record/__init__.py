"""Torch ops in, programs out. Reading order: handle, decide, recorder, assemble, device, python/."""
