"""What names stand for: globals, variables, attributes, and the code that uses them."""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazystep

from .common import Case, Cases, Doubler, Function, captured, check_change, scale_of

case = Cases()


activation: Any = torch.sin
network: Any = None
flag = True
temperature = 2.0


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {name: globals()[name] for name in ("activation", "helper", "network", "flag", "temperature")}
    yield
    globals().update(before)
    sys.modules.pop("users_other_settings", None)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


helper: Any = double


def through_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if flag else x * 3


def class_with_a_scale() -> Any:
    """A class of its own for each case."""

    class Options:
        scale = 2.0

    return Options


def module_with(**values: Any) -> Any:
    """A module of the user's, with these names."""
    module = types.ModuleType("users_module")
    module.__dict__.update(values)
    return module


def set_globals(**values: Any) -> Callable[[], None]:
    return lambda: globals().update(values)


clear_flag = set_globals(flag=False)


case.rows(
    global_number=lambda: (lambda x: x * temperature, set_globals(temperature=3.0)),
    global_function_of_torch=lambda: (lambda x: activation(x), set_globals(activation=torch.cos)),
    global_function_of_the_user=lambda: (lambda x: helper(x), set_globals(helper=lambda x: x * 5)),
    global_of_a_function_that_is_called=lambda: (lambda x: through_a_global(x), clear_flag),
    global_as_text=lambda: (lambda x: x * (2 if globals()["flag"] else 3), clear_flag),
    name_in_a_module=lambda: scale_of(module_with(scale=2.0)),
    variable_of_a_class=lambda: scale_of(class_with_a_scale()),
    variable_of_an_objects_class=lambda: scale_of(class_with_a_scale()(), set_on=type),
    variable_of_a_parent_class=lambda: scale_of(
        type("Options", (class_with_a_scale(),), {})(), set_on=lambda options: type(options).__base__
    ),
    attribute_that_hides_that_of_the_class=lambda: scale_of(class_with_a_scale()()),
)


@case
def global_model() -> Case:
    globals().update(network=nn.Linear(3, 3).to("lazy"))
    return lambda x: network(x).detach(), lambda: globals().update(network=nn.Linear(3, 3).to("lazy"))


@case
def closure_variable_with_a_function() -> Case:
    function: Any = torch.sin

    def change() -> None:
        nonlocal function
        function = torch.cos

    return lambda x: function(x), change


@case
def name_in_a_module_that_is_imported_inside() -> Case:
    module = module_with(scale=2.0)
    sys.modules["users_other_settings"] = module

    def function(x: torch.Tensor) -> torch.Tensor:
        import users_other_settings

        return x * users_other_settings.scale

    return function, lambda: setattr(module, "scale", 3.0)


@case
def function_in_a_module() -> Case:
    module = module_with(activation=torch.sin)
    return lambda x: module.activation(x), lambda: setattr(module, "activation", torch.cos)


@case
def name_in_a_module_as_text() -> Case:
    module = module_with(scale=2.0)
    return lambda x: x * getattr(module, "scale", 1.0), lambda: setattr(module, "scale", 3.0)


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
        clear_flag()
        scale.cache_clear()

    return lambda x: x * scale(), change


class UsesAGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made_with = 2.0 if flag else 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if flag else x * 3

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if flag else x * 3

    @staticmethod
    def static_method(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if flag else x * 3

    @property
    def scale(self) -> float:
        return 2.0 if flag else 3.0


USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "method": lambda model, x: model.method(x),
    "property": lambda model, x: x * model.scale,
    "static method": lambda model, x: UsesAGlobal.static_method(x),
    "forward": lambda model, x: nn.Sequential(model)(x),
    "where an object is made": lambda model, x: x * UsesAGlobal().made_with,
}


@pytest.mark.parametrize("use", USES)
def test_global_is_noticed_wherever_a_class_uses_it(use: str) -> None:
    model = UsesAGlobal().to("lazy")
    check_change(lambda x: USES[use](model, x), clear_flag)


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


@case
def method_that_torch_calls() -> Case:
    class Layer(nn.TransformerEncoderLayer):
        def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
            return through_a_global(x)

    layer = Layer(3, 1, 4, dropout=0.0, batch_first=True, norm_first=True).to("lazy")
    return lambda x: layer(x.reshape(1, 1, 3)).detach(), clear_flag


@case
def method_found_by_its_name() -> Case:
    class Losses:
        kind = "doubled"

        def loss_doubled(self, x: torch.Tensor) -> torch.Tensor:
            return through_a_global(x)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, "loss_" + self.kind)(x)

    return Losses().run, clear_flag


@case
def attribute_in_a_pattern() -> Case:
    Options = class_with_a_scale()
    options = Options()
    options.scale = 2.0

    def function(x: torch.Tensor) -> torch.Tensor:
        match options:
            case Options(scale=scale):
                return x * scale
        raise AssertionError

    return function, lambda: setattr(options, "scale", 3.0)


@case
def attribute_behind_a_getter() -> Case:
    options = types.SimpleNamespace(scale=2.0)
    get = operator.attrgetter("scale")
    return lambda x: x * get(options), lambda: setattr(options, "scale", 3.0)


# -- what is captured ------------------------------------------------------------------------------


def with_options(options: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if options.flag else x * 3


def flag_of(use: Callable[[Doubler], Function]) -> Case:
    doubler = Doubler()
    return use(doubler), lambda: setattr(doubler, "flag", False)


case.rows(
    bound_method=lambda: flag_of(lambda doubler: doubler.run),
    object_that_can_be_called=lambda: flag_of(lambda doubler: doubler),
    partial=lambda: flag_of(lambda doubler: functools.partial(with_options, doubler)),
)


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


@pytest.mark.parametrize("make", case.parameters)
def test_change_is_noticed(make: Callable[[], Case]) -> None:
    check_change(*make())


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


LOSS: Any = 0.0


def test_global_with_the_name_of_an_attribute_may_change() -> None:
    global LOSS
    results = types.SimpleNamespace(LOSS=2.0)
    doubled = captured(lambda x: {"LOSS": x * results.LOSS}, fullgraph=True)
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
    step = captured(function)
    for _ in range(4):
        assert step(torch.ones(1)).item() == 2
    assert step.num_replayed > 0
    importlib.import_module(f"{package.name}.options").scale = 3.0  # type: ignore[attr-defined]
    assert step(torch.ones(1)).item() == 3
