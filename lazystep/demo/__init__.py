"""The demonstration: a byte-level GPT learns Python from Python's own standard library."""
