"""Which programs there are, and which executable runs each of them.

Reading order: program_cache, agreement, families, tiered, loaded, kept, check, history.
"""
