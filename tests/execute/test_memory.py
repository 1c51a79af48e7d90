"""What a process keeps: memory that steps free, and not what a check has used. In processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


GIVING_BACK = """
import torch
from lazystep.execute.malloc import give_freed_memory_back, keep_freed_memory

def size():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

assert keep_freed_memory()
before = size()
blocks = [torch.ones(1_000_000) for _ in range(50)]
last = torch.ones(1000)  # at the end of the heap, so what lies before it is not returned by itself
del blocks
kept = size()
assert give_freed_memory_back()
print(before, kept, size())
"""


def test_freed_memory_is_given_back_on_request() -> None:
    done = run_python("-c", GIVING_BACK)
    assert done.returncode == 0, done.stderr
    before, kept, after = map(int, done.stdout.split())
    assert kept - before > 150_000
    assert after - before < 20_000


HEAPS = """
import ctypes, tempfile
import torch, lazystep
from lazystep.runtime import runtime

x = torch.ones(1000, device="lazy")
for _ in range(20):
    x = (x * 1.01).cumsum(0)
    lazystep.mark_step()
lazystep.wait_device_ops()
assert runtime.executor._thread is not None
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.fclose.argtypes = [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
with tempfile.NamedTemporaryFile("r") as file:
    stream = libc.fopen(file.name.encode(), b"w")
    assert libc.malloc_info(0, stream) == 0
    libc.fclose(stream)
    print(file.read().count("<heap nr="))
"""


@pytest.mark.parametrize(("environ", "is_shared"), [({}, True), ({"MALLOC_ARENA_MAX": "8"}, False)])
def test_the_executor_shares_the_heap_of_the_training_thread_unless_told(environ, is_shared) -> None:
    done = run_python("-c", HEAPS, OMP_NUM_THREADS="1", LAZYSTEP_TIER="reference", **environ)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) == 1) is is_shared


def num_page_faults(what: str) -> int:
    done = run_python("-c", SCRIPT, what)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_freed_memory_is_kept() -> None:
    assert num_page_faults("leave") > 1000
    assert num_page_faults("keep") < 100


TRAINING = """
import json, sys
import torch, torch._dynamo  # torch.optim imports it

device = sys.argv[1]
if device == "lazy":
    import lazystep
    from lazystep.metrics import counter_value
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(3)]).to(device)
optimizer = torch.optim.Adam(model.parameters())

def train(num_steps):
    for _ in range(num_steps):
        loss = model(torch.ones(2, 2048).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "lazy":
            lazystep.mark_step()
    loss.item()

train(4)
if device == "lazy":
    assert lazystep.wait_for_compile(250)
train(4)
with open("/proc/self/status") as lines:
    status = dict(line.split(":", 1) for line in lines)
found = {"peak": int(status["VmHWM"].split()[0]), "now": int(status["VmRSS"].split()[0])}
if device == "lazy":
    assert counter_value("native_executions") >= 2
    names = "native_checks", "check_bytes_on_disk", "check_bytes_in_memory", "memory_given_back"
    found |= {name: counter_value(name) for name in names}
print(json.dumps(found))
"""


# Each large block has a mapping of its own, which ends with the block, so the process is as large as the
# blocks that live. With heaps, the peak depends on holes and on the thread of each step, and differs by a
# fifth.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "LAZYSTEP_KEEP_MEMORY": "0"}


@pytest.mark.timeout(600)
def test_check_of_a_library_holds_no_second_state(tmp_path: Path) -> None:
    """The check needs the state of 150 MB twice more, and nothing of it is in the process."""
    environ = {"LAZYSTEP_CACHE_DIR": str(tmp_path / "cache"), "LAZYSTEP_TIER": "auto"}
    ways: dict[str, tuple[str, dict[str, str]]] = {
        "eager": ("cpu", EXACT),
        "building": ("lazy", EXACT),
        "cached": ("lazy", EXACT),
        "checked again": ("lazy", {"LAZYSTEP_CHECK_NATIVE": "4"}),
    }
    found = {}
    for name, (device, own) in ways.items():
        done = run_python("-c", TRAINING, device, **environ, **own)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout)
    assert [found[name]["native_checks"] for name in ("building", "cached", "checked again")] == [1, 0, 2]
    assert found["building"]["check_bytes_on_disk"] >= 2 * 3 * 3 * 2048 * 2048 * 4  # all state, twice
    assert found["building"]["check_bytes_in_memory"] == 0
    assert found["building"]["now"] <= 1.05 * found["cached"]["now"], found
    assert found["building"]["peak"] <= 1.15 * found["eager"]["peak"], found
    # Where malloc keeps freed memory, that is returned after each check. Otherwise there is none to return.
    assert [found[name]["memory_given_back"] for name in ("building", "checked again")] == [0, 2]
