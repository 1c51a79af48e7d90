"""Capture: `@lazystep.step` records a step function, then replays it without running its Python.

Reading order: values, arguments, traced, places, op_numbers, c_calls, surroundings, visible, testimony,
code_owners, outside, place_finder, classes, objects, called, witness, ambient, guards, lasting, changes,
stored_numbers, given_containers, random_state, recorded_program, recorded, outline, recipes, evaluation,
audits, replay, notes, step.
What is in C is in src/, typed in _witness.pyi and _places.pyi.
"""

from ..extensions import PLACES, WITNESS

PLACES.load()  # or an error that says how to build it
WITNESS.load()
