"""What decides how a builtin, a module or an object behaves, and is read by no name.

Each scene was replayed with the old numbers before the witness knew its kind.
"""

from __future__ import annotations

import builtins
import collections
import ctypes
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from .scenes import Scene, Scenes, check_replays, check_right, check_right_or_refused
from .undo import patch, restore, undo

scene, refused = Scenes(), Scenes()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    restore()


# -- torch, modules and builtins ----------------------------------------------------------------------


def of_torch(step: Callable[[Any], Any], owner: Any, name: str, value: Any) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        restore()
        return Scene(step=step, change=lambda: patch(owner, name, value))

    return make


RELU = nn.ReLU()
scene.rows(
    method_of_tensors=of_torch(lambda x: x.relu(), torch.Tensor, "relu", lambda self: self + 3),
    operator_of_tensors=of_torch(lambda x: x * 2, torch.Tensor, "__mul__", lambda self, other: self + other),
    call_of_a_module=of_torch(lambda x: RELU(x), nn.ReLU, "__call__", lambda self, x: x + 3),
)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_weight_norm_of_the_old_form_moves_and_is_replayed() -> None:
    """Its weight is a result whose graph holds the parameters, so that torch could not swap them."""

    def make(device: str) -> Scene:
        torch.manual_seed(0)
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def change() -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            model.to("cpu")
            model.to(device)

        return Scene(step=step, change=change, kept=lambda: [p.detach().clone() for p in model.parameters()])

    step, replays = check_right(make)
    assert replays[5] >= 2, step.explain()


def tried_key() -> float:
    try:
        return {}["a"]
    except ValueError:
        return 3.0
    except Exception:
        return 2.0


def imports_math() -> float:
    import math

    return math.floor(2.5)


def replaced_import(name: str, *args: Any, **kwargs: Any) -> Any:
    found = _import(name, *args, **kwargs)
    return types.SimpleNamespace(floor=lambda x: 3.0) if name == "math" else found


_import = builtins.__import__
scene.rows(
    builtin_function=of_torch(lambda x: x * ascii(2.0).count("."), builtins, "ascii", lambda x: "..."),
    builtin_number=of_torch(lambda x: x * abs(-2), builtins, "abs", lambda x: 3.0),
    builtin_exception=of_torch(lambda x: x * tried_key(), builtins, "ValueError", KeyError),
    builtin_import=of_torch(lambda x: x * imports_math(), builtins, "__import__", replaced_import),
)


@scene
def builtins_of_a_module_of_its_own(device: str) -> Scene:
    names = dict(vars(builtins))
    module: dict[str, Any] = {"__builtins__": names, "__name__": "users_own"}
    exec("def step(x): return x * len([1, 2])", module)
    return Scene(step=module["step"], change=lambda: names.update(len=lambda x: 3.0))


def module_case(change: Callable[[Any], Any], name: str = "missing") -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        class Module(types.ModuleType):
            number = 2.0

        module: Any = Module("users_module") if name == "number" else types.ModuleType("users_module")
        module.__getattr__ = lambda name: 2.0
        module.there = 2.0
        return Scene(step=lambda x: x * getattr(module, name), change=lambda: change(module))

    return make


class ModuleOfThree(types.ModuleType):
    @property
    def there(self) -> float:
        return 3.0


scene.rows(
    name_that_a_module_makes=module_case(lambda m: setattr(m, "__getattr__", lambda name: 3.0)),
    name_of_a_class_of_modules=module_case(lambda m: setattr(type(m), "number", 3.0), "number"),
    module_of_another_class=module_case(lambda m: setattr(m, "__class__", ModuleOfThree), "there"),
)


@scene
def names_of_a_module(device: str) -> Scene:
    module: Any = types.ModuleType("users_module")
    return Scene(
        step=lambda x: x * (3.0 if "added" in dir(module) else 2.0),
        change=lambda: setattr(module, "added", 1),
    )


# -- other objects -------------------------------------------------------------------------------------


@scene
def read_only_dict_that_gets_a_key(device: str) -> Scene:
    names: dict[str, float] = {}
    shown = types.MappingProxyType(names)
    return Scene(step=lambda x: x * shown.get("a", 2.0), change=lambda: names.update(a=3.0))


@scene
def deque_of_another_length_at_most(device: str) -> Scene:
    holder = types.SimpleNamespace(deque=collections.deque([1.0], maxlen=2))
    return Scene(
        step=lambda x: x * holder.deque.maxlen,
        change=lambda: setattr(holder, "deque", collections.deque([1.0], maxlen=3)),
    )


@scene
def dict_with_other_attributes(device: str) -> Scene:
    class Options(dict[str, Any]):
        scale = 2.0

    holder, other = types.SimpleNamespace(options=Options()), Options()
    other.scale = 3.0
    holder.options.scale = 2.0
    return Scene(step=lambda x: x * holder.options.scale, change=lambda: setattr(holder, "options", other))


@scene
def array_that_becomes_read_only(device: str) -> Scene:
    array = np.ones(2)
    return Scene(
        step=lambda x: x * (2.0 if array.flags.writeable else 3.0), change=lambda: array.setflags(write=False)
    )


def divided(x: Any) -> Any:
    try:
        return x * float((np.ones(1) / np.zeros(1))[0] > 1)
    except FloatingPointError:
        return x * 3


def numpy_setting(step: Callable[[Any], Any], change: Callable[[], Any]) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        restore()
        errors, precision = np.geterr(), np.get_printoptions()["precision"]
        undo.extend((lambda: np.seterr(**errors), lambda: np.set_printoptions(precision=precision)))
        np.seterr(all="ignore")
        return Scene(step=step, change=change)

    return make


scene.rows(
    errors_of_numpy=numpy_setting(divided, lambda: np.seterr(all="raise")),
    printing_of_numpy=numpy_setting(
        lambda x: x * np.get_printoptions()["precision"], lambda: np.set_printoptions(precision=3)
    ),
)


@scene
def object_that_dies(device: str) -> Scene:
    class Thing:
        number = 2.0

    holder: Any = types.SimpleNamespace(thing=Thing())
    table = weakref.WeakValueDictionary({"a": holder.thing})
    return Scene(
        step=lambda x: x * (table["a"].number if "a" in table else 3.0),
        change=lambda: delattr(holder, "thing"),
    )


@refused
def pointer_of_ctypes(device: str) -> Scene:
    number = ctypes.c_double(2.0)
    pointer = ctypes.pointer(number)
    return Scene(step=lambda x: x * pointer.contents.value, change=lambda: setattr(number, "value", 3.0))


@refused
def numbers_of_a_cache(device: str) -> Scene:
    @functools.lru_cache
    def cached(number: int) -> int:
        return number

    cached(1)
    return Scene(step=lambda x: x * cached.cache_info().currsize, change=lambda: cached(2))


@refused
def number_of_weak_references(device: str) -> Scene:
    class Thing:
        pass

    thing, kept = Thing(), []
    return Scene(
        step=lambda x: x * (1 + weakref.getweakrefcount(thing)),
        change=lambda: kept.append(weakref.ref(thing)),
    )


@refused
def size_of_a_storage(device: str) -> Scene:
    whole = torch.arange(8.0).to(device)
    holder = types.SimpleNamespace(tensor=whole[:4].clone())
    return Scene(
        step=lambda x: x * holder.tensor.untyped_storage().nbytes(),
        change=lambda: setattr(holder, "tensor", whole[:4]),
    )


# -- arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_moved", [False, True], ids=["lazy", "moved"])
def test_attribute_that_an_argument_does_not_have(is_moved: bool) -> None:
    def make(device: str) -> Scene:
        def arguments(number: int) -> tuple[Any, ...]:
            x: Any = torch.ones(3) if is_moved else torch.ones(3).to(device)
            if number >= 9:
                x.mark = 3.0
            return (x,)

        return Scene(step=lambda x: x * (x.mark if hasattr(x, "mark") else 2.0), arguments=arguments)

    step, replays = check_right(make)
    assert replays[5] >= 2, step.explain()
    assert "'mark' of an argument" in step.explain()


@pytest.mark.parametrize("make", scene.parameters)
def test_change_is_noticed_and_replayed(make: Any) -> None:
    check_replays(make)


@pytest.mark.parametrize("make", refused.parameters)
def test_change_is_noticed_or_refused(make: Any) -> None:
    check_right_or_refused(make)
