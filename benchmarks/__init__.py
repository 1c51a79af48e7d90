"""Benchmarks of lazystep. Run one as a module, from the root: `python -m benchmarks.recording`."""
