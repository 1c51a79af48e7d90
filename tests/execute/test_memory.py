"""Memory that is freed stays with the process: counted by page faults, in a process of its own."""

from __future__ import annotations

from tests.helpers import run_python

SCRIPT = """
import resource, sys, threading
import torch
from lazystep.execute.malloc import keep_freed_memory

def allocate():
    # Larger than what malloc may have learned to keep by itself.
    blocks = [torch.ones(10_000_000) for _ in range(2)]
    del blocks

def work():
    for _ in range(20):
        allocate()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        allocate()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)

if sys.argv[1] == "keep":
    assert keep_freed_memory()
thread = threading.Thread(target=work)  # as the executor, not on the heap of the main thread
thread.start()
thread.join()
"""


def num_page_faults(what: str) -> int:
    done = run_python("-c", SCRIPT, what)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_freed_memory_is_kept() -> None:
    assert num_page_faults("leave") > 1000
    assert num_page_faults("keep") < 100
