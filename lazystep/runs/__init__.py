"""Reports of training runs: the files that a run writes, and the page made from them.

facts (the runtime's data at the end) -> directory (facts, timeline, log and program on disk) -> page.
"""
