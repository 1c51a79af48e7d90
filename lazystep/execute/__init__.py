"""Programs in, tensors out. Reading order: executable, reference, run, executor."""
