"""The programs that this process knows: a bounded cache in memory, looked up by exact key.

The key is the known recording, which the recorder has identified by comparing entries exactly: a
hash collision costs a comparison and never a wrong program. One key has a variant per set of
outputs that was asked for. A variant that computes more than is wanted this time serves too, so
that a tensor freed late by the garbage collector does not make a new program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
E = TypeVar("E")


class Variant(Generic[E]):
    """An executable and the values that it returns."""

    __slots__ = ("executable", "output_set", "outputs")

    def __init__(self, outputs: tuple[int, ...], executable: E) -> None:
        self.outputs = outputs
        self.output_set = frozenset(outputs)
        self.executable = executable


class ProgramCache(Generic[K, E]):
    """Least recently used programs go first. Not thread-safe: the barrier holds the recorder's lock."""

    def __init__(self) -> None:
        self._variants: OrderedDict[K, list[Variant[E]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(variants) for variants in self._variants.values())

    def find(self, key: K, outputs: Sequence[int]) -> Variant[E] | None:
        """A variant of the program `key` that returns at least `outputs`."""
        variants = self._variants.get(key)
        if variants is None:
            return None
        self._variants.move_to_end(key)
        wanted = tuple(outputs)
        for variant in variants:
            if variant.outputs == wanted:
                return variant
        for variant in variants:
            if variant.output_set.issuperset(wanted):
                return variant
        return None

    def add(self, key: K, variant: Variant[E], limit: int) -> None:
        """Keep a new variant, and at most `limit` keys."""
        self._variants.setdefault(key, []).append(variant)
        self._variants.move_to_end(key)
        while len(self._variants) > limit:
            self._variants.popitem(last=False)

    def clear(self) -> None:
        """Forget every program."""
        self._variants.clear()
