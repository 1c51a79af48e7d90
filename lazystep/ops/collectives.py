"""Collectives on lazy tensors: recorded in the order of the program, in the step group beside their group.

`dist.all_reduce`, `broadcast`, `all_gather`, `all_gather_into_tensor`, `reduce_scatter_tensor` and torch's
functional collectives arrive here. A recorded collective is in order with the ops around it, as on a CUDA
stream, so the `Work` that the caller gets has nothing to wait for. Others, such as `send`, run on the host
and synchronize.

[Note: refused calls] What gloo would refuse is refused while it is recorded, at the user's line. A
collective that fails while it runs breaks its group, because the other ranks may be waiting in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from ..process_groups import find_group, group_of_one, step_group
from ..program import collectives  # noqa: F401 - declares the ops
from ..record.recorder import Recorder
from .handlers import handles, handles_later
from .host import run_on_host

_REDUCE_OPS = {
    int(getattr(dist.ReduceOp.RedOpType, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def in_place(tensor: Tensor, launch: Callable[[Tensor], object]) -> Tensor:
    """Record a collective that writes `tensor`, and the wait for it. The network takes dense memory only."""
    dense = tensor.contiguous()
    launch(dense)
    torch.ops.lazystep.wait_(dense)
    return tensor if dense is tensor else tensor.copy_(dense)


def all_reduce(tensor: Tensor, op: str, group: str) -> Tensor:
    """Record an all-reduce of `tensor`, in place. `group`: the name of a step group."""
    _try("all_reduce", tensor.dtype, op)
    return in_place(tensor, lambda dense: torch.ops.lazystep.all_reduce_(dense, op, group))


def broadcast(tensor: Tensor, root: int, group: str) -> Tensor:
    """Record a broadcast into `tensor` from the rank `root` of the group."""
    _try("broadcast", tensor.dtype)
    return in_place(tensor, lambda dense: torch.ops.lazystep.broadcast_(dense, root, group))


def all_gather(out: Tensor, tensor: Tensor, group: str) -> Tensor:
    """Record an all-gather of `tensor` into `out`."""
    _try("all_gather", tensor.dtype)
    _compare("all_gather", "output", out, "input", tensor, group)
    source = tensor.contiguous()
    return in_place(out, lambda dense: torch.ops.lazystep.all_gather_(dense, source, group))


def reduce_scatter(out: Tensor, tensor: Tensor, op: str, group: str) -> Tensor:
    """Record a reduce-scatter of `tensor` into `out`."""
    _try("reduce_scatter", tensor.dtype, op)
    _compare("reduce_scatter", "input", tensor, "output", out, group)
    source = tensor.contiguous()
    return in_place(out, lambda dense: torch.ops.lazystep.reduce_scatter_(dense, source, op, group))


@cache
def _try(kind: str, dtype: torch.dtype, op: str = "sum") -> None:
    """Raise gloo's own error if it does not take this type, or this op on it. See [Note: refused calls]."""
    group, x, out = group_of_one(), torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype)
    reduce_op = getattr(dist.ReduceOp, op.upper())
    try:
        if kind == "all_reduce":
            group.allreduce([x], reduce_op).wait()
        elif kind == "broadcast":
            group.broadcast(x, 0).wait()
        elif kind == "all_gather":
            group._allgather_base(out, x).wait()
        else:
            options = dist.ReduceScatterOptions()
            options.reduceOp = reduce_op
            group._reduce_scatter_base(out, x, options).wait()
    except RuntimeError as error:
        how = f" with {op!r}" if "reduce" in kind else ""
        raise RuntimeError(f"gloo has no {kind} of {dtype}{how}: {error}") from None


def _compare(kind: str, whole_name: str, whole: Tensor, part_name: str, part: Tensor, group: str) -> None:
    """Raise if the whole does not have the elements of one part from each rank."""
    size = find_group(group).size
    if whole.dtype != part.dtype or whole.numel() != size * part.numel():
        raise RuntimeError(
            f"{kind} over {size} ranks: expected {size * part.numel()} elements of {part.dtype} in the "
            f"{whole_name}, {size} times those of the {part_name}; got {whole.numel()} of {whole.dtype}"
        )


def _work(results: list[Tensor]) -> Any:
    """A `Work` that has ended, with these results."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(results)
    return _create_work_from_future(future).boxed()


# -- torch.distributed: (..., process group, ...) -> results and a Work ------------------------------------

_c10d = torch.ops.c10d


@handles(_c10d.allreduce_.default)
def _allreduce(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, group, op = args[0], args[1], args[2]
    if not _is_plain(tensors, op):
        return run_on_host(recorder, func, args, kwargs, "collective that is not recorded")
    for tensor in tensors:
        all_reduce(tensor, _reduce_op(op), _name_of(group))
    return tensors, _work(tensors)


@handles(_c10d.broadcast_.default)
def _broadcast(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, group, root = args[0], args[1], args[2]
    if not _is_plain(tensors):
        return run_on_host(recorder, func, args, kwargs, "collective that is not recorded")
    for tensor in tensors:
        broadcast(tensor, root, _name_of(group))
    return tensors, _work(tensors)


@handles(_c10d._allgather_base_.default)
def _allgather_base(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out, tensor, group = args[0], args[1], args[2]
    if not _is_plain([out, tensor]):
        return run_on_host(recorder, func, args, kwargs, "collective that is not recorded")
    return all_gather(out, tensor, _name_of(group)), _work([out])


@handles(_c10d.allgather_.default)
def _allgather(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outs, tensors, group = args[0], args[1], args[2]
    flat = [tensor for parts in outs for tensor in parts]
    is_even = all(part.shape == tensors[0].shape for part in flat)
    if len(tensors) != 1 or not is_even or not _is_plain([*flat, *tensors]):
        return run_on_host(recorder, func, args, kwargs, "collective that is not recorded")
    gathered = tensors[0].new_empty((len(flat), *tensors[0].shape))
    all_gather(gathered, tensors[0], _name_of(group))
    for part, result in zip(flat, gathered, strict=True):
        part.copy_(result)
    return outs, _work(flat)


@handles(_c10d._reduce_scatter_base_.default)
def _reduce_scatter_base(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out, tensor, group, op = args[0], args[1], args[2], args[3]
    if not _is_plain([out, tensor], op):
        return run_on_host(recorder, func, args, kwargs, "collective that is not recorded")
    return reduce_scatter(out, tensor, _reduce_op(op), _name_of(group)), _work([out])


def _is_plain(tensors: list[Tensor], op: Any = None) -> bool:
    """Whether a program can hold the collective: dense lazy tensors, and an op with a name."""
    are_plain = all(t.device.type == "lazy" and t.layout is torch.strided for t in tensors)
    return are_plain and (op is None or op._get_method("op")() in _REDUCE_OPS)


def _reduce_op(op: Any) -> str:
    return _REDUCE_OPS[op._get_method("op")()]


def _name_of(group: Any) -> str:
    return step_group(dist.ProcessGroup.unbox(group)).name


# -- torch's functional collectives: (..., name of the group) -> a new tensor ------------------------------

_functional = torch.ops._c10d_functional


@handles(_functional.all_reduce.default)
def _functional_all_reduce(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    return all_reduce(args[0].clone(memory_format=torch.contiguous_format), args[1], _resolve(args[2]))


@handles(_functional.all_reduce_.default)
def _functional_all_reduce_(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    return all_reduce(args[0], args[1], _resolve(args[2]))


@handles(_functional.all_reduce_coalesced.default)
def _functional_all_reduces(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    group = _resolve(args[2])
    return [all_reduce(t.clone(memory_format=torch.contiguous_format), args[1], group) for t in args[0]]


@handles(_functional.all_reduce_coalesced_.default)
def _functional_all_reduces_(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    group = _resolve(args[2])
    return [all_reduce(tensor, args[1], group) for tensor in args[0]]


@handles(_functional.broadcast.default)
def _functional_broadcast(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    return broadcast(args[0].clone(memory_format=torch.contiguous_format), args[1], _resolve(args[2]))


@handles(_functional.broadcast_.default)
def _functional_broadcast_(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    return broadcast(args[0], args[1], _resolve(args[2]))


@handles(_functional.all_gather_into_tensor.default)
def _functional_all_gather(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    return _gathered(args[0], args[1], _resolve(args[2]))


@handles(_functional.all_gather_into_tensor_coalesced.default)
def _functional_all_gathers(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    group = _resolve(args[2])
    return [_gathered(tensor, args[1], group) for tensor in args[0]]


@handles(_functional.all_gather_into_tensor_out.default)
def _functional_all_gather_out(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    return all_gather(kwargs["out"], args[0], _resolve(args[2]))


@handles(_functional.reduce_scatter_tensor.default)
def _functional_reduce_scatter(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    return _scattered(args[0], args[1], args[2], _resolve(args[3]))


@handles(_functional.reduce_scatter_tensor_coalesced.default)
def _functional_reduce_scatters(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    group = _resolve(args[3])
    return [_scattered(tensor, args[1], args[2], group) for tensor in args[0]]


@handles(_functional.reduce_scatter_tensor_out.default)
def _functional_reduce_scatter_out(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any
) -> Tensor:
    return reduce_scatter(kwargs["out"], args[0], args[1], _resolve(args[3]))


@handles(_functional.wait_tensor.default)
def _wait_tensor(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return args[0]  # the wait is recorded with the launch


@handles_later("_c10d_functional::_wrap_tensor_autograd")
def _wrap_tensor(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """torch's functions wrap a result in a tensor that waits when it is used. Here the wait is recorded."""
    return args[0]


class _Waited:
    """A functional collective together with the wait for its results."""

    def __init__(self, func: Any) -> None:
        self._func = func
        self._schema = func._schema
        self.namespace = func.namespace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._func(*args, **kwargs)
        for result in [found] if isinstance(found, Tensor) else found or ():
            _functional.wait_tensor.default(result)
        return found

    def __str__(self) -> str:
        return str(self._func)


def _wait_on_host(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_on_host(recorder, _Waited(func), args, kwargs, "collective that is not recorded")


# The others of this namespace return before the network has written, and nobody would wait: a recorded
# `wait_tensor` has nothing to wait for. `isend` and `irecv` are new in torch 2.13.
for _name in ("all_to_all_single", "isend", "irecv", "batch_p2p_ops"):
    if hasattr(_functional, _name):
        handles(getattr(_functional, _name).default)(_wait_on_host)


def _gathered(tensor: Tensor, size: int, group: str) -> Tensor:
    return all_gather(tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:])), tensor, group)


def _scattered(tensor: Tensor, op: str, size: int, group: str) -> Tensor:
    out = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    return reduce_scatter(out, tensor, op, group)


def _resolve(group: Any) -> str:
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    found = resolve(group) if isinstance(group, str) else group
    return step_group(found).name
