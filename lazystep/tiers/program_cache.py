"""The programs that this process knows: a bounded cache in memory, looked up by exact key.

The key is the known recording. The recorder has identified it by comparing entries exactly, so a hash
collision costs a comparison and never gives a wrong program. One key has a variant per set of outputs. A
variant with more outputs than are wanted this time serves too, so that a tensor that the garbage collector
frees late does not make a new program.
"""

from __future__ import annotations

from collections import OrderedDict

from ..record._recorder import KnownRecording
from .tiered import TieredExecutable


class Variant:
    """An executable and the values that it returns."""

    __slots__ = ("executable", "output_set", "outputs")

    def __init__(self, outputs: tuple[int, ...], executable: TieredExecutable) -> None:
        self.outputs = outputs
        self.output_set = frozenset(outputs)
        self.executable = executable


class ProgramCache:
    """Least recently used programs go first. Not thread-safe: the barrier holds the recorder's lock."""

    def __init__(self) -> None:
        self._variants: OrderedDict[KnownRecording, list[Variant]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(variants) for variants in self._variants.values())

    def find(self, key: KnownRecording, outputs: tuple[int, ...]) -> Variant | None:
        """A variant of the program `key` that returns at least `outputs`."""
        variants = self._variants.get(key)
        if variants is None:
            return None
        self._variants.move_to_end(key)
        for variant in variants:
            if variant.outputs == outputs:
                return variant
        for variant in variants:
            if variant.output_set.issuperset(outputs):
                return variant
        return None

    def add(self, key: KnownRecording, variant: Variant, limit: int) -> None:
        """Keep a new variant, and at most `limit` keys."""
        self._variants.setdefault(key, []).append(variant)
        self._variants.move_to_end(key)
        while len(self._variants) > limit:
            self._variants.popitem(last=False)

    def clear(self) -> None:
        """Forget every program."""
        self._variants.clear()
