"""Which programs there are, and which executable runs each of them.

Reading order: program_cache, families, tiered, check, history.
"""
