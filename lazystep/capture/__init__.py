"""Capture: `@lazystep.step` records a step function and replays it without its Python."""
