"""Recording: what an operation on the lazy device becomes."""
