"""Programs in, tensors out.

Reading order: executable, reference, native, library, compare, run, executor, thread_choice, malloc.
"""
