"""Benchmarks of lazystep. Run one from the repository's root: `python -m benchmarks.recording`."""
