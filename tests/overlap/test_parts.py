"""The parts by themselves: views of a bucket, rounding, partial steps, the side stream of an accelerator."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lazystep.errors import UnsupportedError
from lazystep.overlap import as_functional, backward_callbacks
from lazystep.overlap.average import scale
from lazystep.overlap.bucket import Bucket
from lazystep.overlap.bucket_queue import BucketQueue
from lazystep.overlap.event_log import CAPACITY, EventLog
from lazystep.overlap.partial_step import step_only
from lazystep.overlap.side_stream import SideStream


def bucket_of(*parameters: Tensor) -> Bucket:
    numel = sum(p.numel() for p in parameters)
    return Bucket(0, True, torch.arange(float(numel)), parameters)


def test_views_follow_the_strides_of_dense_parameters() -> None:
    channels_last = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    transposed, with_gaps, scalar = torch.empty(3, 2).t(), torch.empty(4, 4)[:, ::2], torch.empty(())
    bucket = bucket_of(channels_last, transposed, with_gaps, scalar)
    views = bucket.gradients(bucket.buffer)
    assert views is not None
    assert [view.shape for view in views] == [p.shape for p in bucket.parameters]
    assert views[0].stride() == channels_last.stride()
    assert views[1].stride() == transposed.stride()
    assert views[2].is_contiguous(), "one with gaps has a gradient without"
    assert [int(view.min()) for view in views] == [0, 120, 126, 134]
    memory = bucket.buffer.untyped_storage().data_ptr()
    assert all(view.untyped_storage().data_ptr() == memory for view in views)


@pytest.mark.parametrize(
    "reduced", [torch.zeros(6, dtype=torch.float16), torch.zeros(5), torch.zeros(2, 3)], ids=str
)
def test_result_of_another_layout_has_no_views(reduced: Tensor) -> None:
    assert bucket_of(torch.empty(2, 3)).gradients(reduced) is None


def test_rounding_multiplies_except_where_ddp_divides() -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    first, second = torch.empty(500), torch.empty(500)
    multiplied, divided = gradient * (1.0 / 3), gradient / 3
    assert not torch.equal(multiplied, divided)

    def scaled(**options: Any) -> Tensor:
        bucket = Bucket(0, True, gradient.clone(), [first, second])
        scale(bucket, 3, **options)
        return bucket.buffer

    assert torch.equal(scaled(), multiplied)
    assert torch.equal(scaled(divide=True), divided)
    mixed = scaled(was_view=lambda p: p is second)
    assert torch.equal(mixed[:500], multiplied[:500])
    assert torch.equal(mixed[500:], divided[500:])


def test_partial_step_leaves_groups_state_and_gradients_of_others_alone() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [a, b]}], lr=0.1, momentum=0.9)
    groups, b.grad = optimizer.param_groups, torch.ones(2)
    version = a._version
    step_only(optimizer, [(a, torch.ones(2), groups[0])])
    assert optimizer.param_groups is groups
    assert groups[0]["params"] == [a, b]
    assert torch.equal(a, torch.full((2,), 0.9))
    assert torch.equal(b, torch.ones(2))
    assert a.grad is None
    assert b.grad is not None
    assert list(optimizer.state) == [a]
    assert a._version > version


def test_fused_update_makes_a_stale_graph_raise() -> None:
    """torch's fused kernels on the CPU don't bump versions: the gradient would be wrong, silently."""
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p], fused=True)
    loss = (p.detach() * torch.ones(2, requires_grad=True)).sum()
    step_only(optimizer, [(p, torch.ones(2), optimizer.param_groups[0])])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_as_functional_steps_parameters_as_they_come() -> None:
    functional = as_functional(torch.optim.AdamW, lr=0.1)
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    reference = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = torch.optim.AdamW(reference, lr=0.1)
    for step in range(4):
        for p, q in zip(parameters, reference, strict=True):
            q.grad = torch.full((3,), float(step - 1))
            functional.step_param(p, q.grad)
        functional.step_param(parameters[0], None)
        optimizer.step()
    assert all(map(torch.equal, parameters, reference))
    assert functional.optimizer is not None
    assert len(functional.optimizer.param_groups) == 1
    with pytest.raises(UnsupportedError, match="LBFGS"):
        as_functional(torch.optim.LBFGS)


def test_log_keeps_the_last_passes() -> None:
    log = EventLog()
    for _ in range(CAPACITY + 5):
        log.bucket_ready(0, torch.zeros(4))
        log.bucket_ready(1, torch.zeros(2))
    entries = log.list()
    assert len(entries) == 2 * CAPACITY
    assert (entries[0].backward, entries[-1].backward) == (6, CAPACITY + 5)
    assert (entries[0].num_bytes, entries[1].num_bytes) == (16, 8)


# -- an accelerator's side stream, with a stand-in -------------------------------------------------


class Streams:
    """Stands in for `torch.cuda`: notes what is asked of its streams."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = "main"

    def Stream(self) -> StandInStream:
        return StandInStream(self, "side")

    def current_stream(self) -> StandInStream:
        return StandInStream(self, self.current)

    @contextmanager
    def stream(self, stream: StandInStream) -> Any:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before


class StandInStream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: StandInStream) -> None:
        self.streams.calls.append(f"{self.name} waits for {other.name}")


def reduction(streams: Streams) -> Any:
    """Stands in for the future of a reduced tensor on the device."""
    note = streams.calls.append
    reduced = SimpleNamespace(record_stream=lambda stream: note(f"kept alive for {stream.name}"))

    def wait() -> Any:
        note(f"{streams.current} waits for a reduction")
        return reduced

    return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("fails", [False, True])
def test_updates_run_on_the_side_stream_and_join_before_backward_returns(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    streams, queued = Streams(), []
    monkeypatch.setattr("lazystep.overlap.bucket_queue.queue_callback", queued.append)

    def update(bucket: Bucket, reduced: Any) -> int:
        streams.calls.append(f"update {bucket.index} on {streams.current}")
        if fails:
            raise ArithmeticError("no")
        return 1

    finished: list[Any] = []
    queue = BucketQueue(update, finished.append, lambda: finished.append("finish"))
    queue.side_stream = SideStream(streams)
    log = EventLog()
    for index in range(2):
        bucket = Bucket(index, index == 1, torch.zeros(1), [])
        queue.add(bucket, reduction(streams), log.bucket_ready(index, bucket.buffer))
    assert streams.calls == [], "nothing waits inside the hooks"
    queued.pop(0)()
    bucket_calls = ["side waits for a reduction", "kept alive for side"]
    expected = ["side waits for main", *bucket_calls, "update 0 on side"]
    if not fails:
        expected += [*bucket_calls, "update 1 on side"]
    assert streams.calls == [*expected, "main waits for side"]
    assert streams.current == "main"
    after_finalizer = queued.pop()
    if fails:
        with pytest.raises(ArithmeticError, match="no"):
            after_finalizer()
        assert [type(error) for error in finished] == [ArithmeticError]
    else:
        after_finalizer()
        assert finished == [None, "finish"]


def test_cpu_has_no_side_stream() -> None:
    assert SideStream.for_device(torch.device("cpu")) is None


def test_callbacks_run_in_order_at_the_end_of_backward() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)

    def first() -> None:
        order.append("first")
        backward_callbacks.queue_callback(lambda: order.append("nested"))

    def hook(_: Tensor) -> None:
        assert backward_callbacks.in_backward()
        backward_callbacks.queue_callback(first)
        backward_callbacks.queue_callback(lambda: order.append("second"))
        order.append("hook")

    x.register_hook(hook)
    assert not backward_callbacks.in_backward()
    (x * 2).backward()
    assert order == ["hook", "first", "second", "nested"]
