"""Every module of PyTorch's module database: lazy equals eager bit for bit, forward and backward.

Modules that draw random numbers (dropout, RReLU, fractional pooling, attention, transformers) are no
exception: their draws come from eager's place in the stream.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import ModuleErrorEnum

import lazystep

from .compare import Outcome, device_difference, device_run_difference, difference, pick, seed, tensors_in
from .conftest import Counts
from .modules import MODULES, cases

# A few modules have hundreds of inputs.
NUM_INPUTS = {torch.float32: 6, torch.float64: 2}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_module_equals_eager_bitwise(name: str, mode: str, counts: Counts) -> None:
    differences: list[str] = []
    for dtype, number in NUM_INPUTS.items():
        if dtype not in MODULES[name].dtypes:
            continue
        label = f"{str(dtype).removeprefix('torch.')}, {mode}"
        for index, case in enumerate(cases(MODULES[name], dtype, mode == "train", number)):
            # The second step of the same shapes runs the program that the first one has made.
            eager = Outcome(case.prepare("cpu", steps=2), "cpu")
            # The database has no input that eager refuses: importing lazystep must not change that.
            assert eager.error is None, f"{label}, input {index}: eager raises {eager.error!r}"
            lazy = Outcome(case.prepare("lazy", steps=2, barrier=lazystep.mark_step), "lazy")
            found = difference(eager, lazy)
            if found is None and lazy.error is None:
                found = device_difference(tensors_in(lazy.tree))
            counts.add(label)
            if found:
                differences.append(f"{label}, input {index}: {found}")
    assert not differences, "\n".join(differences)


TAKING_A_DEVICE = [
    name
    for name, info in MODULES.items()
    if "device" in inspect.signature(info.module_cls.__init__).parameters
]


@pytest.mark.parametrize("name", TAKING_A_DEVICE)
def test_module_made_on_lazy_has_the_parameters_of_eager(name: str, counts: Counts) -> None:
    info = MODULES[name]
    seed()
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    for given in pick(inputs, NUM_INPUTS[torch.float32]):
        args, kwargs = given.constructor_input.args, given.constructor_input.kwargs

        def make(device: str, args: Any = args, kwargs: Any = kwargs) -> dict[str, torch.Tensor]:
            module = info.module_cls(*args, **{**kwargs, "device": device})
            assert all(isinstance(p, nn.Parameter) for p in module.parameters())
            return {k: v for k, v in module.state_dict().items() if not nn.parameter.is_lazy(v)}

        found = device_run_difference(make)
        assert not found, found
        counts.add("made on the device")


def forward_errors(name: str) -> list[Any]:
    """The inputs of a module that eager's forward refuses; a constructor refuses before any tensor."""
    info = MODULES[name]
    seed()
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": True}
    errors = info.module_error_inputs_func(info, **options) if info.module_error_inputs_func else []
    return [e.module_error_input for e in errors if e.error_on is ModuleErrorEnum.FORWARD_ERROR]


WITH_ERRORS = [name for name in MODULES if forward_errors(name)]


@pytest.mark.parametrize("name", WITH_ERRORS)
def test_module_raises_where_eager_does(name: str, counts: Counts) -> None:
    for given in forward_errors(name):

        def run(device: str, given: Any = given) -> Any:
            module = MODULES[name].module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
            args = [a.to(device) if isinstance(a, torch.Tensor) else a for a in given.forward_input.args]
            return module.to(device)(*args, **given.forward_input.kwargs)

        assert Outcome(lambda run=run: run("cpu"), "cpu").error is not None
        found = device_run_difference(run)
        assert not found, found
        counts.add("error inputs")
