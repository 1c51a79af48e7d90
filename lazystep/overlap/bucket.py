"""One DDP bucket: its parameters, and their gradients as views of the reduced tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as GradBucket  # torch.distributed hides its type

Future = torch.futures.Future[Tensor]
Hook = Callable[[Any, GradBucket], Future]
_F = TypeVar("_F", bound=Hook)


def comm_hook(function: _F) -> _F:
    """Prepare a function for `register_comm_hook`.

    DDP compares the function's annotations with classes. Ours are strings, so they are removed.
    """
    function.__annotations__ = {}
    return function


@dataclass(frozen=True)
class Bucket:
    """The bucket that DDP passed to a communication hook, as it was before the hook ran.

    It is copied first because a hook may replace the buffer: `fp16_compress_wrapper` does.
    """

    index: int
    is_last: bool
    buffer: Tensor
    parameters: Sequence[Tensor]

    @classmethod
    def of(cls, bucket: GradBucket) -> Bucket:
        """Read DDP's bucket, inside the call of a hook."""
        return cls(bucket.index(), bucket.is_last(), bucket.buffer(), bucket.parameters())

    def gradients(self, reduced: Tensor) -> list[Tensor] | None:
        """The parameters' gradients as views of the tensor that the reduction returned.

        `GradBucket.gradients()` ignores strides. These views follow DDP's own layout: the gradient of a dense
        parameter has the parameter's strides. None if the reduced tensor has another type or size than the
        bucket: only DDP's finalizer can split such a tensor.
        """
        if reduced.is_sparse:
            return [reduced] if len(self.parameters) == 1 else None
        if self.buffer.is_sparse or reduced.dtype != self.buffer.dtype or reduced.shape != self.buffer.shape:
            return None
        sizes = [p.numel() for p in self.parameters]
        if sum(sizes) != reduced.numel():
            return None
        return [_view(part, p) for part, p in zip(reduced.split(sizes), self.parameters, strict=True)]


def _view(flat: Tensor, parameter: Tensor) -> Tensor:
    if parameter.is_contiguous():
        return flat if parameter.dim() == 1 else flat.view(parameter.shape)
    if _is_dense(parameter):
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
