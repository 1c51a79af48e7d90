"""A captured step and everything around it that Python can change between two calls: each change is noticed.

Each case gives a function and a change. The function is captured and replayed, then the change is made: from
then on the captured function must return what the plain one does.
"""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import functools
import importlib
import json
import math
import operator
import random
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from math import copysign, isclose
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lazystep

Function = Callable[[torch.Tensor], torch.Tensor]
Case = tuple[Function, Callable[[], object]]

CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


# -- what a name stands for ---------------------------------------------------------------------------

activation: Any = torch.sin
network: Any = None
flag = True


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


helper: Any = double


def through_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if flag else x * 3


@case
def global_function_of_torch() -> Case:
    return lambda x: activation(x), lambda: globals().update(activation=torch.cos)


@case
def global_function_of_the_user() -> Case:
    return lambda x: helper(x), lambda: globals().update(helper=lambda x: x * 5)


@case
def global_model() -> Case:
    globals().update(network=nn.Linear(3, 3).to("lazy"))
    return lambda x: network(x).detach(), lambda: globals().update(network=nn.Linear(3, 3).to("lazy"))


@case
def global_of_a_function_that_is_called() -> Case:
    return lambda x: through_a_global(x), lambda: globals().update(flag=False)


@case
def closure_variable_with_a_function() -> Case:
    function: Any = torch.sin

    def change() -> None:
        nonlocal function
        function = torch.cos

    return lambda x: function(x), change


@case
def element_of_a_list() -> Case:
    functions: list[Any] = [torch.sin]
    return lambda x: functions[0](x), lambda: functions.__setitem__(0, torch.cos)


@case
def element_of_a_deque() -> Case:
    factors = collections.deque([2.0])
    return lambda x: x * factors[0], lambda: factors.__setitem__(0, 3.0)


@case
def value_of_a_dict() -> Case:
    functions: dict[str, Any] = {"activation": torch.sin}
    return lambda x: functions["activation"](x), lambda: functions.update(activation=torch.cos)


@case
def key_of_a_dict_is_replaced() -> Case:
    options: dict[str, float] = {"twice": 2.0}

    def change() -> None:
        del options["twice"]
        options["thrice"] = 3.0

    return lambda x: x * (3 if "thrice" in options else 2), change


@case
def element_of_a_set_is_replaced() -> Case:
    options = {"twice"}

    def change() -> None:
        options.remove("twice")
        options.add("thrice")

    return lambda x: x * (3 if "thrice" in options else 2), change


@case
def name_in_a_module() -> Case:
    module: Any = types.ModuleType("users_settings")
    module.scale = 2.0
    return lambda x: x * module.scale, lambda: setattr(module, "scale", 3.0)


@case
def name_in_a_module_that_is_imported_inside() -> Case:
    module: Any = types.ModuleType("users_other_settings")
    module.scale = 2.0
    sys.modules["users_other_settings"] = module

    def function(x: torch.Tensor) -> torch.Tensor:
        import users_other_settings

        return x * users_other_settings.scale

    return function, lambda: setattr(module, "scale", 3.0)


@case
def function_in_a_module() -> Case:
    module: Any = types.ModuleType("users_functions")
    module.activation = torch.sin
    return lambda x: module.activation(x), lambda: setattr(module, "activation", torch.cos)


@case
def variable_of_a_class() -> Case:
    class Options:
        scale = 2.0

    return lambda x: x * Options.scale, lambda: setattr(Options, "scale", 3.0)


@case
def variable_of_an_objects_class() -> Case:
    class Options:
        scale = 2.0

    options = Options()
    return lambda x: x * options.scale, lambda: setattr(Options, "scale", 3.0)


@case
def variable_of_a_parent_class() -> Case:
    class Base:
        scale = 2.0

    class Options(Base):
        pass

    options = Options()
    return lambda x: x * options.scale, lambda: setattr(Base, "scale", 3.0)


@case
def attribute_that_hides_that_of_the_class() -> Case:
    class Options:
        scale = 2.0

    options = Options()
    return lambda x: x * options.scale, lambda: setattr(options, "scale", 3.0)


@case
def attribute_that_is_not_named() -> Case:
    options = types.SimpleNamespace(scale=2.0)
    return lambda x: x * getattr(options, "sc" + "ale"), lambda: setattr(options, "scale", 3.0)


@case
def function_with_a_cache() -> Case:
    @functools.lru_cache
    def scale() -> float:
        return 2.0 if flag else 3.0

    def change() -> None:
        globals().update(flag=False)
        scale.cache_clear()

    return lambda x: x * scale(), change


@case
def global_used_in_a_method() -> Case:
    class Model:
        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if flag else x * 3

    model = Model()
    return lambda x: model.scale(x), lambda: globals().update(flag=False)


@case
def global_used_in_a_property() -> Case:
    class Model:
        @property
        def scale(self) -> float:
            return 2.0 if flag else 3.0

    model = Model()
    return lambda x: x * model.scale, lambda: globals().update(flag=False)


@case
def global_used_in_a_static_method() -> Case:
    class Model:
        @staticmethod
        def scale(x: torch.Tensor) -> torch.Tensor:
            return x * 2 if flag else x * 3

    return lambda x: Model.scale(x), lambda: globals().update(flag=False)


@case
def global_used_in_forward() -> Case:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if flag else x * 3

    model = nn.Sequential(Model()).to("lazy")
    return lambda x: model(x), lambda: globals().update(flag=False)


@case
def method_is_replaced() -> Case:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = Model().to("lazy")
    return lambda x: model(x), lambda: setattr(Model, "forward", lambda self, x: x * 3)


@case
def method_of_one_object_is_replaced() -> Case:
    model = nn.Identity().to("lazy")
    return lambda x: model(x) + 0, lambda: setattr(model, "forward", lambda x: x * 3)


# -- what is captured ---------------------------------------------------------------------------------


class Doubler:
    def __init__(self) -> None:
        self.flag = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.flag else x * 3

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def with_options(options: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if options.flag else x * 3


@case
def bound_method() -> Case:
    doubler = Doubler()
    return doubler.run, lambda: setattr(doubler, "flag", False)


@case
def object_that_can_be_called() -> Case:
    doubler = Doubler()
    return doubler, lambda: setattr(doubler, "flag", False)


@case
def partial() -> Case:
    doubler = Doubler()
    return functools.partial(with_options, doubler), lambda: setattr(doubler, "flag", False)


@case
def partial_in_a_variable() -> Case:
    doubler = Doubler()
    function = functools.partial(with_options, options=doubler)
    return lambda x: function(x=x), lambda: setattr(doubler, "flag", False)


@case
def wrapped_function() -> Case:
    doubler = Doubler()

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(x: torch.Tensor) -> torch.Tensor:
            return function(x) if doubler.flag else function(x) * 2

        return wrapper

    return decorate(lambda x: x + 1), lambda: setattr(doubler, "flag", False)


@case
def module() -> Case:
    model = nn.Sequential(nn.Dropout(0.5), nn.Softmax(0)).to("lazy")
    return model, lambda: model.eval()


@case
def default_of_an_argument() -> Case:
    def function(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    return function, lambda: setattr(function, "__defaults__", (3.0,))


@case
def code_of_a_function() -> Case:
    def called(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    return lambda x: called(x), lambda: setattr(called, "__code__", other.__code__)


# -- state in other shapes ----------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 2.0


@case
def attribute_in_slots() -> Case:
    slots = Slots()
    return lambda x: x * slots.scale, lambda: setattr(slots, "scale", 3.0)


@case
def numpy_array() -> Case:
    array = np.full(3, 2.0, dtype=np.float32)
    return lambda x: x * torch.from_numpy(array).to("lazy"), lambda: array.fill(3.0)


@case
def numpy_number() -> Case:
    numbers = types.SimpleNamespace(scale=np.float64(2.0))
    return lambda x: x * float(numbers.scale), lambda: setattr(numbers, "scale", np.float64(3.0))


@case
def complex_number() -> Case:
    numbers = types.SimpleNamespace(scale=2 + 1j)
    return lambda x: x * numbers.scale.real, lambda: setattr(numbers, "scale", 3 + 1j)


@case
def array_of_bytes() -> Case:
    numbers = bytearray([2])
    return lambda x: x * numbers[0], lambda: numbers.__setitem__(0, 3)


@case
def tensor_that_numpy_writes() -> Case:
    array = np.full(3, 2.0, dtype=np.float32)
    tensor = torch.from_numpy(array)
    return lambda x: x * tensor.to("lazy"), lambda: array.fill(3.0)


@case
def object_behind_a_weak_reference() -> Case:
    doubler = Doubler()
    reference = weakref.ref(doubler)

    def function(x: torch.Tensor) -> torch.Tensor:
        there = reference()
        assert there is not None
        return there(x)

    return function, lambda: setattr(doubler, "flag", False)


@case
def child_of_an_empty_module() -> Case:
    model = nn.Sequential().to("lazy")
    return lambda x: model(x) + 0, lambda: model.append(nn.Softmax(0))


@case
def buffer_that_is_added() -> Case:
    model = nn.Identity().to("lazy")

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (3 if dict(model.named_buffers()) else 2)

    return function, lambda: model.register_buffer("scale", torch.ones(1, device="lazy"))


@case
def one_tensor_in_two_places() -> Case:
    first = torch.ones(3, device="lazy")
    state = {"a": first, "b": first}
    return lambda x: x * state["a"] + 10 * state["b"], lambda: state.update(b=first * 7)


@case
def attribute_of_an_optimizer() -> Case:
    class Scaled(torch.optim.SGD):
        scale = 2.0

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(self.scale)
            return super().step(closure)

    weight = nn.Parameter(torch.ones(3).to("lazy"))
    optimizer = Scaled([weight], lr=0.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        (weight * x).sum().backward()
        optimizer.step()
        assert weight.grad is not None
        made = weight.grad + 0
        optimizer.zero_grad()
        return made

    return function, lambda: setattr(optimizer, "scale", 3.0)


@case
def private_attribute_of_a_layer() -> Case:
    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self._scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self._scale

    layer = Layer().to("lazy")
    return lambda x: layer(x).detach(), lambda: setattr(layer, "_scale", 3.0)


@case
def method_that_torch_calls() -> Case:
    class Layer(nn.TransformerEncoderLayer):
        def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
            return through_a_global(x)

    layer = Layer(3, 1, 4, dropout=0.0, batch_first=True, norm_first=True).to("lazy")
    return lambda x: layer(x.reshape(1, 1, 3)).detach(), lambda: globals().update(flag=False)


@case
def gradient_mode_of_a_plain_tensor() -> Case:
    first, second = (torch.ones(3).to("lazy").requires_grad_() for _ in range(2))

    def function(x: torch.Tensor) -> torch.Tensor:
        wanted = [p for p in (first, second) if p.requires_grad]
        gradients = torch.autograd.grad((first * x * second).sum(), wanted)
        return torch.stack(gradients).sum(0)

    return function, lambda: second.requires_grad_(False)


@case
def hook_of_a_plain_tensor() -> Case:
    weight = torch.ones(3).to("lazy").requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((weight * x).sum(), weight)[0]

    return function, lambda: weight.register_hook(lambda grad: grad * 3)


@case
def method_found_by_its_name() -> Case:
    class Losses:
        kind = "doubled"

        def loss_doubled(self, x: torch.Tensor) -> torch.Tensor:
            return through_a_global(x)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, "loss_" + self.kind)(x)

    losses = Losses()
    return losses.run, lambda: globals().update(flag=False)


@case
def name_in_a_module_as_text() -> Case:
    module: Any = types.ModuleType("users_settings")
    module.scale = 2.0
    return lambda x: x * getattr(module, "scale", 1.0), lambda: setattr(module, "scale", 3.0)


@case
def global_as_text() -> Case:
    return lambda x: x * (2 if globals()["flag"] else 3), lambda: globals().update(flag=False)


@case
def attribute_in_a_pattern() -> Case:
    options = Slots()

    def function(x: torch.Tensor) -> torch.Tensor:
        match options:
            case Slots(scale=scale):
                return x * scale
        raise AssertionError

    return function, lambda: setattr(options, "scale", 3.0)


@case
def attribute_behind_a_getter() -> Case:
    options = types.SimpleNamespace(scale=2.0)
    get = operator.attrgetter("scale")
    return lambda x: x * get(options), lambda: setattr(options, "scale", 3.0)


@case
def attribute_of_a_decorator() -> Case:
    class Scaled:
        def __init__(self, function: Function) -> None:
            functools.update_wrapper(self, function)
            self.function = function
            self.scale = 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(x) * self.scale

    scaled = Scaled(lambda x: x + 1)
    return lambda x: scaled(x), lambda: setattr(scaled, "scale", 3.0)


@case
def attribute_that_is_looked_up_by_code() -> Case:
    class Options:
        def __init__(self) -> None:
            self.__dict__["_values"] = {"scale": 2.0}

        def __getattr__(self, name: str) -> Any:
            return self._values[name]

    options = Options()
    return lambda x: x * options.scale, lambda: options._values.update(scale=3.0)


@case
def attribute_of_a_thread() -> Case:
    local = threading.local()
    local.scale = 2.0
    return lambda x: x * local.scale, lambda: setattr(local, "scale", 3.0)


@case
def variable_of_a_context() -> Case:
    variable = contextvars.ContextVar("variable", default=2.0)
    variable.set(2.0)
    return lambda x: x * variable.get(), lambda: variable.set(3.0)


@case
def attribute_of_a_function() -> Case:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scaled.scale  # type: ignore[attr-defined]

    scaled.scale = 2.0  # type: ignore[attr-defined]
    return lambda x: scaled(x), lambda: setattr(scaled, "scale", 3.0)


@case
def attribute_of_a_parameter() -> Case:
    parameter: Any = nn.Parameter(torch.ones(3).to("lazy"))
    parameter.scale = 2.0
    return lambda x: x * parameter.detach() * parameter.scale, lambda: setattr(parameter, "scale", 3.0)


@case
def attribute_of_a_kind_of_dict() -> Case:
    class Options(dict[str, Any]):
        scale = 2.0

    options = Options()
    return lambda x: x * options.scale, lambda: setattr(options, "scale", 3.0)


@case
def value_behind_a_proxy() -> Case:
    values = {"scale": 2.0}
    proxy = types.MappingProxyType(values)
    return lambda x: x * proxy["scale"], lambda: values.update(scale=3.0)


@case
def array_of_numbers() -> Case:
    numbers = array.array("d", [2.0])
    return lambda x: x * numbers[0], lambda: numbers.__setitem__(0, 3.0)


@case
def order_of_a_dict() -> Case:
    functions = collections.OrderedDict(a=lambda x: x + 1, b=lambda x: x * 2)

    def function(x: torch.Tensor) -> torch.Tensor:
        for one in functions.values():
            x = one(x)
        return x

    return function, lambda: functions.move_to_end("a")


@case
def type_in_a_tuple() -> Case:
    options = types.SimpleNamespace(scale=(2,))

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x > 5).to(torch.int64) * options.scale[0]

    return function, lambda: setattr(options, "scale", (2.0,))


@case
def global_used_where_an_object_is_made() -> Case:
    class Made:
        def __init__(self) -> None:
            self.scale = 2.0 if flag else 3.0

    return lambda x: x * Made().scale, lambda: globals().update(flag=False)


@case
def hooks_of_saved_tensors() -> Case:
    weight = torch.ones(3, device="lazy").requires_grad_()
    hooks_of_this = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 3, lambda t: t)

    def change() -> None:
        hooks_of_this.__enter__()
        hooks.append(types.SimpleNamespace(remove=lambda: hooks_of_this.__exit__()))

    return lambda x: torch.autograd.grad((weight * x).sum(), weight)[0], change


# -- hooks --------------------------------------------------------------------------------------------


def linear() -> tuple[nn.Linear, Function]:
    model = nn.Linear(3, 1).to("lazy")

    def gradient(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        model(x).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad + 0

    return model, gradient


@case
def forward_hook_is_replaced() -> Case:
    model = nn.Identity().to("lazy")
    first = model.register_forward_hook(lambda module, args, out: out * 2)

    def change() -> None:
        first.remove()
        model.register_forward_hook(lambda module, args, out: out * 3)

    return lambda x: model(x) + 0, change


@case
def global_used_in_a_hook() -> Case:
    model = nn.Identity().to("lazy")
    model.register_forward_hook(lambda module, args, out: through_a_global(out))
    return lambda x: model(x) + 0, lambda: globals().update(flag=False)


@case
def hook_of_all_modules() -> Case:
    model = nn.Identity().to("lazy")

    def change() -> None:
        hooks.append(nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 3))

    return lambda x: model(x) + 0, change


@case
def hook_of_a_parameter() -> Case:
    model, gradient = linear()
    return gradient, lambda: model.weight.register_hook(lambda grad: grad * 3)


@case
def hook_of_a_parameter_is_replaced() -> Case:
    model, gradient = linear()
    first = model.weight.register_hook(lambda grad: grad * 2)

    def change() -> None:
        first.remove()
        model.weight.register_hook(lambda grad: grad * 3)

    return gradient, change


@case
def hook_after_accumulation() -> Case:
    model, gradient = linear()

    def triple(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(3)

    return gradient, lambda: model.weight.register_post_accumulate_grad_hook(triple)


@case
def full_backward_hook() -> Case:
    first, second = nn.Linear(3, 3).to("lazy"), nn.Linear(3, 1).to("lazy")

    def gradient(x: torch.Tensor) -> torch.Tensor:
        first.zero_grad()
        second.zero_grad()
        second(first(x)).sum().backward()
        assert first.weight.grad is not None
        return first.weight.grad + 0

    return gradient, lambda: second.register_full_backward_hook(lambda m, ins, outs: (ins[0] * 3,))


@case
def hook_of_an_optimizer() -> Case:
    model = nn.Linear(3, 1, bias=False).to("lazy")
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.weight.detach() + 0

    return step, lambda: optimizer.register_step_post_hook(lambda o, a, k: model.weight.data.fill_(3.0))


# -- modes --------------------------------------------------------------------------------------------

hooks: list[Any] = []


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {name: globals()[name] for name in ("activation", "helper", "network", "flag")}
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    globals().update(before)
    for hook in hooks:
        hook.remove()
    hooks.clear()
    sys.modules.pop("users_other_settings", None)
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)


@case
def gradients_off() -> Case:
    weight = torch.ones(3, device="lazy", requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x * weight).sum()
        return torch.ones(1, device="lazy") * (2.0 if y.requires_grad else 3.0)

    return function, lambda: torch.set_grad_enabled(False)


@case
def default_dtype() -> Case:
    return lambda x: torch.ones(3, device="lazy") / 3 + x, lambda: torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_change_is_noticed(name: str) -> None:
    function, change = CASES[name]()
    captured = lazystep.step(function, audit_every=0)  # type: ignore[call-overload]
    x = torch.linspace(-1, 1, 3)

    def compare() -> Any:
        torch.manual_seed(1)
        got = captured(x.clone())
        torch.manual_seed(1)
        want = function(x.clone().to("lazy"))
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
        return want.dtype, want.tolist()

    before = [compare() for _ in range(5)][-1]
    assert captured.num_replayed > 0, captured.explain()
    change()
    after = [compare() for _ in range(5)][-1]
    assert before != after, "the change changes nothing: this test would not see it ignored"


def test_attribute_that_the_step_does_not_use_may_change() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.scale = 2.0
            self.num_steps = 0
            self.last: Any = None

        @lazystep.step(audit_every=0, fullgraph=True)
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    trainer = Trainer()
    for _ in range(8):
        trainer.last = {"out": trainer.step(torch.ones(1)).item()}
        trainer.num_steps += 1
        assert trainer.last == {"out": 2.0}
    assert trainer.step.num_replayed == 6


def test_array_that_is_too_large_to_be_compared_is_refused() -> None:
    array = np.ones(1 << 20, dtype=np.float32)

    @lazystep.step
    def total(x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(array).to("lazy").sum()

    with pytest.warns(lazystep.LazyStepWarning, match="NumPy array .*pass it as an argument"):
        for number in range(4):
            array[0] = number
            assert total(torch.zeros(1)).item() == array.sum()
    assert total.num_replayed == 0


def test_iterator_is_not_frozen() -> None:
    factors = iter([2.0, 2.0, 2.0, 3.0, 4.0])

    @lazystep.step(audit_every=0)
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * next(factors)

    with pytest.warns(lazystep.LazyStepWarning, match="an iterator, .*pass what you get"):
        assert [scaled(torch.ones(1)).item() for _ in range(5)] == [2, 2, 2, 3, 4]


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand()], ids=["random", "numpy"])
def test_numbers_drawn_by_python_are_not_frozen(draw: Callable[[], float]) -> None:
    random.seed(0)
    np.random.seed(0)

    @lazystep.step(audit_every=0)
    def sometimes(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if draw() < 0.9 else x * 3

    with pytest.warns(lazystep.LazyStepWarning, match="draws random numbers"):
        drawn = [sometimes(torch.ones(1)).item() for _ in range(100)]
    assert 3.0 in drawn
    assert sometimes.num_replayed == 0


@pytest.mark.parametrize("what", ["argument and global", "two arguments"])
def test_arguments_that_were_one_value_when_captured(what: str) -> None:
    anchor = torch.ones(2, device="lazy")

    @lazystep.step(audit_every=0)
    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 10 * (anchor if what == "argument and global" else y)

    for _ in range(5):
        assert both(anchor, anchor.detach()).tolist() == [11, 11]
    assert both.num_replayed > 0
    other = torch.full((2,), 5.0, device="lazy")
    assert both(other, anchor * 2).tolist() == ([15, 15] if what == "argument and global" else [25, 25])


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer, weight: optimizer.state.clear(),
        lambda optimizer, weight: optimizer.state.pop(weight),
        lambda optimizer, weight: optimizer.state[weight].update(step=torch.tensor(0.0)),
        lambda optimizer, weight: optimizer.param_groups[0].update(lr=torch.tensor(0.5)),
        lambda optimizer, weight: optimizer.load_state_dict(optimizer.state_dict()),
    ],
    ids=["cleared", "removed", "another count", "a tensor as lr", "loaded"],
)
def test_state_of_an_optimizer_that_is_replaced(change: Callable[..., Any]) -> None:
    def train(decorate: Callable[[Function], Function]) -> list[float]:
        weight = nn.Parameter(torch.ones(3).to("lazy"))
        optimizer = torch.optim.Adam([weight], lr=0.1)

        @decorate
        def step(x: torch.Tensor) -> torch.Tensor:
            (weight * x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return weight.detach() + 0

        for number in range(9):
            if number == 6:
                change(optimizer, weight)
            made = step(torch.ones(3))
        return made.tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)  # a tensor as lr is recorded in each call
        assert train(lazystep.step(audit_every=0)) == train(lambda f: lambda x: f(x.to("lazy")))


def test_schedule_of_a_rate_in_a_tensor() -> None:
    def train(decorate: Callable[[Function], Function]) -> list[float]:
        weight = nn.Parameter(torch.ones(3).to("lazy"))
        optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1))  # type: ignore[arg-type]
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.1)

        @decorate
        def step(x: torch.Tensor) -> torch.Tensor:
            (weight * x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return weight.detach() + 0

        for _ in range(8):
            made = step(torch.ones(3))
            schedule.step()
        return made.tolist()

    assert train(lazystep.step(audit_every=0)) == train(lambda f: lambda x: f(x.to("lazy")))


def test_optimizer_inside_another_one_follows_its_rate() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, params: Any, base: torch.optim.Optimizer) -> None:
            super().__init__(params, {})
            self.base = base

        def step(self, closure: Any = None) -> None:
            self.base.step()

    weight = nn.Parameter(torch.zeros(1).to("lazy"))
    wrapper = Wrapper([weight], torch.optim.SGD([weight], lr=1.0))

    @lazystep.step(audit_every=0, fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        (weight * x).sum().backward()
        wrapper.step()
        wrapper.zero_grad()
        return weight.detach() + 0

    assert [step(torch.ones(1)).item() for _ in range(5)] == [-1, -2, -3, -4, -5]
    wrapper.base.param_groups[0]["lr"] = 10.0
    assert step(torch.ones(1)).item() == -15
    assert step.num_replayed >= 3


def test_gradient_of_a_plain_tensor_that_is_set_between_calls() -> None:
    weight = torch.ones(2, device="lazy").requires_grad_()

    @lazystep.step(audit_every=0)
    def gradient(x: torch.Tensor) -> torch.Tensor:
        (weight * x).sum().backward()
        assert weight.grad is not None
        made = weight.grad + 0
        weight.grad = None
        return made

    for _ in range(5):
        assert gradient(torch.ones(2)).tolist() == [1, 1]
    assert gradient.num_replayed > 0
    weight.grad = torch.full((2,), 10.0, device="lazy")
    assert gradient(torch.ones(2)).tolist() == [11, 11]
    assert weight.grad is None


def test_draws_from_a_generator_of_its_own_are_not_frozen() -> None:
    generator = torch.Generator().manual_seed(1)

    @lazystep.step(audit_every=0)
    def sometimes(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand((), generator=generator).item() < 0.9 else x * 3

    with pytest.warns(lazystep.LazyStepWarning, match="draws random numbers"):
        drawn = [sometimes(torch.ones(1)).item() for _ in range(100)]
    assert 3.0 in drawn


def test_more_objects_than_can_be_followed_are_refused() -> None:
    data = [[number] for number in range(51_000)]

    @lazystep.step
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * len(data)

    with pytest.warns(lazystep.LazyStepWarning, match="more than 50000 objects"):
        for _ in range(3):
            assert scaled(torch.ones(1)).item() == 51_000


TABLE = {1.0: 5.0, 2.0: 6.0}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x * TABLE.get(w, 7.0),
        lambda x, w: x * 2 if w in {1.0, 2.0} else x * 3,
        lambda x, w: x * float(f"{w:.0f}"),
        lambda x, w: x * float(str(w)),
        lambda x, w: x * 2 if isclose(w, 1.0) else x * 3,
        lambda x, w: x * copysign(2.0, w),
        lambda x, w: x * math.sqrt(abs(w)),
    ],
    ids=["dict", "set", "format", "text", "imported", "sign", "followed"],
)
def test_number_that_leads_to_others(function: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    captured = lazystep.step(function, audit_every=0)  # type: ignore[call-overload]
    x = torch.ones(2, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)  # some are recorded in each call in the end
        for w in (3.0, 3.0, 3.0, 1.0, -2.0, 1.0, 25.0):
            assert captured(x, w).tolist() == function(x.to("lazy"), w).tolist()
    assert captured.num_replayed > 0


def test_numbers_that_leave_the_step_are_true_ones() -> None:
    log: list[float] = []
    options = types.SimpleNamespace(last=0.0)

    @lazystep.step(audit_every=0)
    def scaled(x: torch.Tensor, w: float) -> Any:
        log.append(w)
        options.last = w * 2
        options.new = w
        return x * w, w * 0.5

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)
        for _ in range(3):
            made = scaled(torch.ones(1), 0.3)
            assert json.dumps([made[1], log[-1], options.last, options.new]) == "[0.15, 0.3, 0.6, 0.3]"

    @lazystep.step(audit_every=0)
    def halved(x: torch.Tensor, w: float) -> Any:
        return x * w, w * 0.5

    for _ in range(5):
        assert json.dumps(halved(torch.ones(1), 0.3)[1]) == "0.15"
    assert halved.num_replayed == 3


def test_number_that_python_refuses_is_left_to_the_function() -> None:
    @lazystep.step(audit_every=0)
    def inverse(x: torch.Tensor, w: float) -> torch.Tensor:
        try:
            return x * (1 / w)
        except ZeroDivisionError:
            return x * 100.0

    for w in (2.0, 4.0, 2.0, 4.0):
        assert inverse(torch.ones(1), w).item() == 1 / w
    assert inverse.num_replayed > 0
    assert inverse(torch.ones(1), 0.0).item() == 100


@pytest.mark.parametrize("kind", ["inference", "sparse", "conjugate", "random"])
def test_things_in_reach_that_have_no_version(kind: str) -> None:
    with torch.inference_mode():
        inference = torch.ones(3)
    things: dict[str, Any] = {
        "inference": inference,
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.tensor([1 + 1j]).conj(),
        "random": random.SystemRandom(),
    }
    thing = things[kind]

    @lazystep.step(audit_every=0)
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if thing is not None else 3)

    for _ in range(4):
        assert scaled(torch.ones(1)).item() == 2
    assert scaled.num_replayed > 0


def test_device_as_a_context_in_each_iteration() -> None:
    @lazystep.step(audit_every=0, fullgraph=True)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.ones(1)

    for _ in range(5):
        with torch.device("lazy"):
            assert doubled(torch.ones(1)).item() == 3
    assert doubled.num_replayed == 3


def test_plain_tensor_that_is_replaced_in_each_step_is_replayed() -> None:
    state = {"w": torch.ones(2, device="lazy").requires_grad_()}

    @lazystep.step(audit_every=0, fullgraph=True)
    def descend(x: torch.Tensor) -> torch.Tensor:
        weight = state["w"]
        (gradient,) = torch.autograd.grad((weight * x).sum(), weight)
        state["w"] = (weight - 0.5 * gradient).detach().requires_grad_()
        return weight.detach() + 0

    assert [descend(torch.ones(2))[0].item() for _ in range(6)] == [1, 0.5, 0, -0.5, -1, -1.5]
    assert descend.num_replayed == 4
    assert state["w"].requires_grad


LOSS: Any = 0.0


def test_global_with_the_name_of_an_attribute_may_change() -> None:
    global LOSS
    results = types.SimpleNamespace(LOSS=2.0)

    @lazystep.step(audit_every=0, fullgraph=True)
    def doubled(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"LOSS": x * results.LOSS}

    for number in range(6):
        LOSS = doubled(torch.ones(1))["LOSS"].item() + number
        assert 2 + number == LOSS
    assert doubled.num_replayed == 4


@pytest.mark.parametrize(
    "how", ["from .options import scale", "from . import options; scale = options.scale"]
)
def test_module_imported_from_the_own_package_inside(how: str, tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / f"_users_package_{len(how)}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "options.py").write_text("scale = 2.0")
    (package / "steps.py").write_text(f"def scaled(x):\n    {how}\n    return x * scale\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module(f"{package.name}.steps").scaled
    captured = lazystep.step(function, audit_every=0)
    for _ in range(4):
        assert captured(torch.ones(1)).item() == 2
    assert captured.num_replayed > 0
    importlib.import_module(f"{package.name}.options").scale = 3.0  # type: ignore[attr-defined]
    assert captured(torch.ones(1)).item() == 3
