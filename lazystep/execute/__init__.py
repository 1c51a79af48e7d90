"""Programs in, tensors out.

Reading order: executable, reference, native, library, compare, communicate, run, threads, executor,
thread_choice, malloc.
"""
