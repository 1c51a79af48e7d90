"""Writes random programs: fills the holes of the grammar's lines with what eager has at each line."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch
from hypothesis import strategies as st

from .grammar import ALONE, AROUND, CREATE, FITTING, INDEX, KINDS, OPTIONS, OUT, TEMPLATES, Pick
from .programs import Machine, Program

NUM_LINES = 36
MAX_NUMEL = 300
MAX_TENSORS = 12


class _Holes:
    """Fills the holes of a template, knowing the tensors that eager has at this line."""

    def __init__(self, pick: Pick, tensors: dict[str, torch.Tensor], fresh: Iterator[int]) -> None:
        self._pick = pick
        self._fresh = fresh
        # The last ones first: what depends on what was just made is more likely to break.
        self._tensors = dict(reversed(tensors.items()))
        self._taken: dict[str, str] = {}

    def __getitem__(self, hole: str) -> str:
        if hole in self._taken:
            return self._taken[hole]
        if hole in ("new", "newh"):
            return f"{'h' if hole == 'newh' else 'v'}{next(self._fresh)}"
        if hole in OPTIONS:
            return str(self._pick(OPTIONS[hole]))
        if hole in FITTING:
            return FITTING[hole](self._operand(), self._pick)
        self._taken[hole] = name = self._tensor(hole)
        return name

    def _operand(self) -> torch.Tensor:
        """The tensor that dimensions and shapes are chosen for: the one that was named first."""
        return next((self._tensors[n] for n in self._taken.values() if n in self._tensors), torch.zeros(3, 4))

    def _tensor(self, hole: str) -> str:
        names = [name for name in self._tensors if name[0] == ("h" if hole == "h" else "v")]
        if hole == "f":
            names = [name for name in names if self._tensors[name].is_floating_point()]
        elif hole == "leaf":
            names = [n for n in names if _is_leaf(self._tensors[n])]
        elif hole in ("y", "z") and self._pick((1, 1, 0)):
            names = [n for n in names if _fits(self._tensors[n], self._operand())] or names
        if hole == "z":
            names = [name for name in names if name not in self._taken.values()]
        if not names:
            raise LookupError(hole)
        return str(self._pick(names[: self._pick((3, MAX_TENSORS))]))


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:  # a view that autograd refuses to tell about
        return False


def _fits(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        torch.broadcast_shapes(one.shape, other.shape)
    except RuntimeError:
        return False
    return True


def write(seed: int, num_lines: int = NUM_LINES) -> Program:
    """The program of a seed, of about this length. Runs it on the CPU on the way."""
    pick = random.Random(seed).choice
    eager = Machine("cpu")
    lines: list[str] = []
    fresh = itertools.count()

    def add(line: str) -> None:
        lines.append(line)
        eager.run(line)

    add(f"v{next(fresh)} = torch.linspace(-2, 3, 12, device=D).view(3, 4).clone().requires_grad_()")
    add(f"v{next(fresh)} = v0 * 2")
    while len(lines) < num_lines:
        kind = pick(KINDS)
        try:
            line = pick(TEMPLATES[kind]).format_map(_Holes(pick, eager.tensors(), fresh))
        except LookupError:
            continue  # there is no such tensor at this place
        if kind not in (CREATE, INDEX) and not any(part in line for part in ALONE):
            line = pick(AROUND).format(line)
        # Lines that eager refuses are interesting, but not many of them, and not those with several results
        # or with `out=`: eager may have done a part before it raises.
        may_raise = kind != OUT and "_foreach" not in line and pick(range(8)) == 0
        if eager.run(line) is None or may_raise:
            lines.append(line)
        for name, tensor in eager.tensors().items():
            if tensor.numel() > MAX_NUMEL:
                add(f"del {name}")
        if len(eager.tensors()) > MAX_TENSORS:
            add(f"del {next(iter(eager.tensors()))}")
    return Program(lines)


def programs(num_lines: int = NUM_LINES) -> st.SearchStrategy[Program]:
    """Random programs. By a seed, because hypothesis likes to repeat parts of what it draws."""
    return st.integers(0, 2**24 - 1).map(lambda seed: write(seed, num_lines))
