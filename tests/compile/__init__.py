"""Builds: the compiler, the builder process and the cache on disk, also when they fail."""
