"""Recordings in, executables out. Reading order: programs."""
