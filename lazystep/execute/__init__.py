"""Programs in, tensors out.

Reading order: executable, reference, native, library, compare, run, threads, executor, thread_choice, malloc.
"""
