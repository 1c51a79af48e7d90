"""Capture: `@lazystep.step` records a step function, then replays it without running its Python."""
