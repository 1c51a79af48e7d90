"""Programs: a step as pure data.

Reading order: types, program, verify, prune, printer, difference, serialize, signature.
"""
