"""Training runs seen as a whole: what one leaves in a directory, and how that is read.

facts (what the runtime knows in the end) -> directory (facts, timeline, log, program on disk) -> page.
"""
