"""Which elements of which parameter belong to which rank, when optimizer state is sharded. Pure arithmetic.

Each parameter is cut into blocks of `BLOCK` elements, in the order of its memory. Each rank gets a run of
whole blocks of each parameter, about as many as the others. So the division depends on the sizes of the
parameters alone: not on buckets, which are made anew in the second step. In each bucket every rank has its
share.

[Note: blocks] Kernels of torch work on whole vectors and finish the rest of a tensor element by element,
which may round differently. A cut at a multiple of `BLOCK` is a cut between vectors, so each element
is computed as in the whole parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 64  # a multiple of two vectors of any type and any instruction set


class Partition:
    """The cuts of parameters, in the order in which they are added."""

    def __init__(self, num_ranks: int) -> None:
        self._loads = [0] * num_ranks

    def add(self, size: int) -> tuple[int, ...]:
        """Where a parameter of `size` elements is cut: rank n has the elements from cut n to cut n + 1."""
        num_ranks = len(self._loads)
        num_blocks = -(-size // BLOCK)
        shares = [num_blocks // num_ranks] * num_ranks
        # What is left goes to the ranks that have least so far.
        by_load = sorted(range(num_ranks), key=lambda rank: self._loads[rank])
        for rank in by_load[: num_blocks % num_ranks]:
            shares[rank] += 1
        cuts = [0]
        for rank, share in enumerate(shares):
            cuts.append(min(cuts[-1] + share * BLOCK, size))
            self._loads[rank] += cuts[-1] - cuts[-2]
        return tuple(cuts)


def width(cuts: Sequence[tuple[int, ...]], rank: int) -> int:
    """How many elements of some parameters a rank has."""
    return sum(cut[rank + 1] - cut[rank] for cut in cuts)
