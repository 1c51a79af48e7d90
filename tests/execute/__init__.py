"""Execution: barriers, reads, the executor, and native libraries at work."""
