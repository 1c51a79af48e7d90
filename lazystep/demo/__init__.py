"""The demo: a byte-level GPT learns Python from the source of Python's standard library."""
