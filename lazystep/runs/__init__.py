"""Reports of training runs: the files that a run writes, and the page made from them.

Reading order: facts (the runtime's data at the end), directory (facts, timeline, log and program on disk),
chart_data, page.
"""
