"""Programs: a step as pure data.

Reading order: types, own_ops, updates, program, verify, collectives, prune, lists, schedule, printer,
difference, serialize, signature.
"""
