"""The reducer: sums the gradients of a lazy module over all ranks, bucket by bucket, while backward is
recorded.

It stands where torch's C++ `Reducer` stands in `DistributedDataParallel`, and gives the same bits. A bucket
is one flat tensor. Gloo's sum of an element depends on the element's position in it, so the buckets are
torch's: the first backward has one bucket with all parameters, in the order of the module; then the
parameters are bucketed again in the order in which rank 0 has got its gradients. Each gradient is
multiplied by 1/ranks on its way into the bucket.

The reduction of a bucket is recorded in the hook of its last gradient. The gradients become views of the
bucket there. `program/schedule.py` moves the wait behind the launches that follow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false, make_contiguous_strides_for

from ..ops.collectives import all_reduce
from ..process_groups import StepGroup
from ..record import observer


class Settings(NamedTuple):
    """What the arguments of `DistributedDataParallel`, and a hook, say about reductions."""

    initial_limits: list[int]  # the sizes of buckets in the first backward, in bytes
    rebuilt_limits: list[int]
    finds_unused: bool
    gradient_as_bucket_view: bool
    divides: bool  # divide a whole bucket by the number of ranks, instead of multiplying each gradient
    compression: torch.dtype | None = None  # the type in which buckets travel, if it is another one


class Reducer:
    """Buckets the parameters of one module, and records the reduction of their gradients."""

    def __init__(
        self, parameters: Sequence[Tensor], names: Sequence[str], group: StepGroup, settings: Settings
    ) -> None:
        self._parameters = list(parameters)
        self._names = list(names)
        self._group = group
        self._settings = settings
        self._static: _StaticGraph | None = None
        initial = _assign(self._parameters, settings.initial_limits, range(len(self._parameters)))
        self.buckets = initial[::-1]
        # The order in which gradients have come in the first backward; None if the buckets stay as they are.
        self._arrivals: list[int] | None = None if settings.finds_unused else []
        # The gradients that the last reduction has left behind, by parameter, if the bits depend on that.
        # Weak: `zero_grad` frees them.
        self._views: dict[int, weakref.ref[Tensor]] = {}
        # The parameters that this rank has used since the last reduction, also under no_sync, as torch counts
        # them: backward has come to them, and they have a gradient.
        self._used: set[int] = set()
        self._backward: _Backward | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self._parameters)
        ]

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda _: self._on_gradient(index)

    def with_hook(self, compression: torch.dtype | None) -> Reducer:
        """A reducer that divides whole buckets and sends them in another type, in the place of this one."""
        self._remove_autograd_hooks()
        settings = self._settings._replace(divides=True, compression=compression)
        found = Reducer(self._parameters, self._names, self._group, settings)
        if self._static is not None:
            found._set_static_graph()
        return found

    # -- what DistributedDataParallel calls, by the names of torch's reducer ---------------------------------

    def prepare_for_forward(self) -> None:
        """Raise if the last backward has left buckets that were not reduced."""
        backward, self._backward = self._backward, None
        if backward is None or not backward.has_begun:
            return
        missing = [self._names[index] for index in backward.awaited]
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        has = "had one in the first backward of this static graph" if self._static else "were not reduced"
        static = " instead of static_graph=True" if self._static else ""
        raise RuntimeError(
            f"the last backward gave no gradient to {len(missing)} parameters ({shown}), which {has}. "
            f"Pass find_unused_parameters=True to DistributedDataParallel{static}, or make all outputs of "
            "forward part of the loss."
        )

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """Expect the gradients of one backward. `outputs`: where to look for unused parameters.

        With `find_unused_parameters` the end of the backward is collective: it blocks until the other ranks
        have recorded theirs.
        """
        unused: frozenset[int] = frozenset()
        if self._static is not None:
            unused = self._static.unused
        elif self._settings.finds_unused:
            reached = set(_leaves_behind(outputs))
            unused = frozenset(n for n, p in enumerate(self._parameters) if p not in reached)
            watching = observer.current()
            if watching is not None:
                watching.on_exchange(
                    "find_unused_parameters asks the other ranks in each step; leave it out if all are used"
                )
        self._backward = _Backward(self.buckets, unused)

    def _rebuild_buckets(self) -> bool:
        """Bucket the parameters in the order of rank 0's gradients, once. Collective; blocks for rank 0."""
        if self._arrivals is None:
            return False
        unused = sorted(self._static.unused) if self._static is not None else []
        if len(self._arrivals) + len(unused) < len(self._parameters):
            return False
        order = torch.tensor(self._arrivals + unused)
        message = self._group.messages.broadcast([order], dist.BroadcastOptions())
        self._group.finish(message, "the order of the buckets, in the second step,")
        self._arrivals = None
        self.buckets = _assign(self._parameters, self._settings.rebuilt_limits, order.tolist())
        return True

    def _set_static_graph(self) -> None:
        self._static = _StaticGraph()
        self._arrivals = []

    def _delay_all_reduce(self) -> None:
        """The first backward of a static graph has ended: learn which parameters it uses, and reduce all.

        Collective: blocks until the other ranks have recorded theirs.
        """
        backward, graph = self._backward, self._static
        assert graph is not None
        graph.is_learnt = True
        if backward is None:
            return  # under no_sync; torch fails here. The next backward has to use all parameters.
        graph.unused = frozenset(backward.awaited)
        graph.kept = self._unused_everywhere()
        self._backward = None
        with torch.no_grad():
            for bucket in self.buckets:
                self._give(self._reduce(bucket), graph.kept)

    def _remove_autograd_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # -- during backward -------------------------------------------------------------------------------------

    def _on_gradient(self, index: int) -> None:
        backward = self._backward
        is_learning = self._static is not None and not self._static.is_learnt
        # Without a gradient it leads to an output that the loss does not use.
        if (self._finds_unused or is_learning) and self._parameters[index].grad is not None:
            self._used.add(index)
        if backward is None:
            return  # no_sync
        if index not in backward.awaited:
            raise RuntimeError(
                f"the parameter {self._names[index]} got a second gradient in one backward, after its bucket "
                "was reduced, or one that find_unused_parameters or the first backward of a static graph "
                "did not expect. Reentrant checkpointing does this: use checkpoint(..., use_reentrant=False)."
            )
        if is_learning:
            backward.awaited.discard(index)
            return
        if self._arrivals is not None:
            self._arrivals.append(index)
        with torch.no_grad():
            for bucket in backward.arrive(index):
                reduced = self._reduce(bucket)
                if self._finds_unused:
                    backward.reduced.update(reduced)
                else:
                    self._give(reduced, self._static.kept if self._static is not None else frozenset())
            if not backward.awaited:
                self._backward = None
                if self._finds_unused:
                    # Only now is it known which gradients came: an output may be no part of the loss.
                    self._give(backward.reduced, self._unused_everywhere())

    @property
    def _finds_unused(self) -> bool:
        return self._settings.finds_unused and self._static is None

    def _reduce(self, bucket: tuple[int, ...]) -> dict[int, Tensor]:
        """Record the reduction of a bucket. Gives the reduced gradients, which are views of it."""
        flat = torch.cat(self._rows(bucket))
        sent = flat.to(self._settings.compression) if self._settings.compression is not None else flat
        if self._settings.divides:
            sent.div_(self._group.size)
        flat = all_reduce(sent, "sum", self._group.name).to(flat.dtype)
        offset = 0
        views = {}
        for index in bucket:
            parameter = self._parameters[index]
            # Detached: the gradients are all that keeps the bucket.
            views[index] = flat.as_strided(parameter.shape, _layout(parameter), offset).detach()
            offset += parameter.numel()
        return views

    def _give(self, reduced: dict[int, Tensor], kept: frozenset[int]) -> None:
        """Give the parameters their reduced gradients, except those whose gradients are kept as they are."""
        for index, view in reduced.items():
            if index not in kept:
                self._parameters[index].grad = view
                if self._settings.gradient_as_bucket_view:
                    self._views[index] = weakref.ref(view)

    def _rows(self, bucket: tuple[int, ...]) -> list[Tensor]:
        """The gradients of a bucket, each as a row in the layout of its parameter, scaled as torch does."""
        scale = 1.0 / self._group.size
        rows = []
        for index in bucket:
            parameter = self._parameters[index]
            gradient = parameter.grad
            if gradient is None:  # unused on this rank
                gradient = torch.zeros_like(parameter)
            elif self._settings.divides:
                pass  # later, as a whole
            elif index in self._views and gradient is self._views[index]():
                gradient = gradient / self._group.size  # it is in the bucket already, where torch divides
            else:
                gradient = gradient * scale
            rows.append(row_of(gradient, parameter))
        return rows

    def _unused_everywhere(self) -> frozenset[int]:
        """The parameters that no rank has used: their gradients are left as they are, as torch does."""
        used = torch.tensor(
            [index in self._used for index in range(len(self._parameters))], dtype=torch.int32
        )
        self._used.clear()
        message = self._group.messages.allreduce([used])
        self._group.finish(message, "which parameters were used, behind backward,")
        return frozenset(torch.nonzero(used == 0).flatten().tolist())


class _StaticGraph:
    """What the first backward of a static graph has shown: the parameters that it left unused.

    torch learns the graph there, and the order of the gradients in the second backward.
    """

    def __init__(self) -> None:
        self.is_learnt = False
        self.unused: frozenset[int] = frozenset()  # on this rank
        self.kept: frozenset[int] = frozenset()  # on all ranks


class _Backward:
    """One backward: which gradients are still to come. Buckets are reduced in their order."""

    def __init__(self, buckets: tuple[tuple[int, ...], ...], unused: frozenset[int]) -> None:
        # By parameter: the gradients of the reduced buckets, while it is not known which are to be kept.
        self.reduced: dict[int, Tensor] = {}
        self.awaited = {index for bucket in buckets for index in bucket} - unused
        self.has_begun = False
        self._buckets = list(buckets)

    def arrive(self, index: int) -> Iterator[tuple[int, ...]]:
        """A gradient is there. Gives the buckets that are complete now, and whose turn it is."""
        self.has_begun = True
        self.awaited.discard(index)
        while self._buckets and self.awaited.isdisjoint(self._buckets[0]):
            yield self._buckets.pop(0)


def _assign(
    parameters: Sequence[Tensor], limits: list[int], order: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """torch's own assignment of parameters to buckets, for parameters in this order."""
    stand_ins = [torch.empty(parameters[n].shape, dtype=parameters[n].dtype, device="meta") for n in order]
    buckets, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(
        stand_ins, limits, [False] * len(stand_ins), list(order)
    )
    return tuple(tuple(bucket) for bucket in buckets)


def _layout(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a parameter's gradient in its bucket: the parameter's own if it is dense."""
    if is_non_overlapping_and_dense_or_false(parameter):
        return parameter.stride()
    return tuple(make_contiguous_strides_for(parameter.shape))


def row_of(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The elements of a gradient in the order in which they lie in the bucket, and in the parameter."""
    strides = _layout(parameter)
    if strides == tuple(make_contiguous_strides_for(parameter.shape)):
        return gradient.reshape(-1)
    if gradient.stride() != strides:
        gradient = torch.empty_strided(
            parameter.shape, strides, dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    # Not by `as_strided`: no library can be built of a step that writes through it.
    by_stride = sorted(range(gradient.dim()), key=lambda dim: -strides[dim])
    return gradient.permute(by_stride).reshape(-1)


def _leaves_behind(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaf tensors that the autograd graph of some tensors leads to."""
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    yield from (output for output in outputs if output.is_leaf)
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                stack.append(after)
