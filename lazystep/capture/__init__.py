"""Capture: `@lazystep.step` records a step function, then replays it without running its Python.

Reading order: arguments, traced, places, reach, guards, ambient, recorded, replay, step.
"""
