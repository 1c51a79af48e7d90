"""Programs in, tensors out.

Reading order: executable, reference, native, library, compare, communicate, diagnose, run, chain, threads,
executor, thread_choice, malloc.
"""
