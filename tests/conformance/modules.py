"""The modules of PyTorch's module database as test cases, shared by the suites that run them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

from .compare import copy_inputs, pick, seed, tensors_in


def _names() -> dict[str, ModuleInfo]:
    seen: Counter[str] = Counter()
    named = {}
    for info in module_db:
        seen[info.name] += 1
        named[f"{info.name}_{seen[info.name]}" if seen[info.name] > 1 else info.name] = info
    return named


MODULES = _names()


class ModuleCase:
    """A module of the database in one mode with one of its inputs: a fresh copy per run."""

    def __init__(self, info: ModuleInfo, given: ModuleInput, dtype: torch.dtype, training: bool) -> None:
        self.inputs = given.forward_input
        seed()
        args, kwargs = given.constructor_input.args, given.constructor_input.kwargs
        self.module: torch.nn.Module = info.module_cls(*args, **kwargs).train(training)
        if not (info.is_lazy and dtype is torch.float32):
            self.module.to(dtype)  # the constructors of the database leave some buffers in float64

    def prepare(
        self, device: str, *, steps: int = 1, barrier: Callable[[], None] = lambda: None
    ) -> Callable[[], Any]:
        """Copy the module and its inputs to a device. The function that runs them forward and backward,
        `steps` times, and returns outputs, gradients and the module's state afterwards.
        """
        module = copy.deepcopy(self.module)
        if device != "cpu":
            module.to(device)
        args, kwargs = copy_inputs((self.inputs.args, self.inputs.kwargs), device)

        def run() -> Any:
            outs = []
            for _ in range(steps):
                out = module(*args, **kwargs)
                sums = [t.sum() for t in tensors_in(out) if t.requires_grad]
                if sums:
                    torch.autograd.backward(sums, [torch.ones_like(s) for s in sums])
                outs.append(out)
                barrier()
            return {
                "out": outs,
                "input gradients": [t.grad for t in tensors_in((args, kwargs))],
                "parameter gradients": {name: p.grad for name, p in module.named_parameters()},
                "state": dict(module.state_dict()),
            }

        return run


def cases(info: ModuleInfo, dtype: torch.dtype, training: bool, number: int) -> Iterator[ModuleCase]:
    """At most `number` cases of a module, of those inputs that have a forward part."""
    seed()
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for given in pick([i for i in inputs if i.forward_input is not None], number):
        yield ModuleCase(info, given, dtype, training)
