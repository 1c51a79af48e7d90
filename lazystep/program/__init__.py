"""What a step is: pure data. Reading order: types, program, verify, prune, printer."""
