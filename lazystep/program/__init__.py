"""Programs: a step as pure data.

Reading order: types, own_ops, program, verify, prune, printer, difference, serialize, signature.
"""
