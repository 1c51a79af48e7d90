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

from .common import Case, Cases, Doubler, Function, check_change, class_with_a_scale, module_with

case = Cases()


activation: Any = torch.sin
network: Any = None
flag = True


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {name: globals()[name] for name in ("activation", "helper", "network", "flag")}
    yield
    globals().update(before)
    sys.modules.pop("users_other_settings", None)


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
def name_in_a_module() -> Case:
    module = module_with(scale=2.0)
    return lambda x: x * module.scale, lambda: setattr(module, "scale", 3.0)


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
def variable_of_a_class() -> Case:
    Options = class_with_a_scale()
    return lambda x: x * Options.scale, lambda: setattr(Options, "scale", 3.0)


@case
def variable_of_an_objects_class() -> Case:
    Options = class_with_a_scale()
    options = Options()
    return lambda x: x * options.scale, lambda: setattr(Options, "scale", 3.0)


@case
def variable_of_a_parent_class() -> Case:
    Base = class_with_a_scale()
    options = type("Options", (Base,), {})()
    return lambda x: x * options.scale, lambda: setattr(Base, "scale", 3.0)


@case
def attribute_that_hides_that_of_the_class() -> Case:
    Options = class_with_a_scale()
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
    check_change(lambda x: USES[use](model, x), lambda: globals().update(flag=False))


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
    return lambda x: layer(x.reshape(1, 1, 3)).detach(), lambda: globals().update(flag=False)


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
    module = module_with(scale=2.0)
    return lambda x: x * getattr(module, "scale", 1.0), lambda: setattr(module, "scale", 3.0)


@case
def global_as_text() -> Case:
    return lambda x: x * (2 if globals()["flag"] else 3), lambda: globals().update(flag=False)


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
