"""What decides how an object, a builtin or an op behaves, and is read by no name: classes, modes, settings.

Each scene was replayed with the old numbers before the witness knew its kind.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .scenes import Scene, Scenes, check_replays, check_right, check_right_or_refused

scene, refused = Scenes(), Scenes()
_undo: list[Callable[[], object]] = []


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    restore()


def restore() -> None:
    while _undo:
        _undo.pop()()


def patch(owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the scene ends."""
    old = owner.__dict__.get(name, as_before)
    _undo.append(lambda: delattr(owner, name) if old is as_before else setattr(owner, name, old))
    setattr(owner, name, value)


# -- classes: what they are made of, and what they get later -------------------------------------------


class TwoParent:
    number: Any = 2.0

    def __len__(self) -> int:
        return 2

    def __add__(self, other: Any) -> float:
        return 2.0

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[int]:
        return iter((2,))

    def __enter__(self) -> float:
        return 2.0

    def __exit__(self, *_: Any) -> None:
        return None

    def __getattr__(self, name: str) -> float:
        return 2.0

    @classmethod
    def of_class(cls) -> float:
        return 2.0

    def method(self) -> float:
        return 2.0


class ThreeParent(TwoParent):
    number = 3.0

    def __len__(self) -> int:
        return 3

    def __add__(self, other: Any) -> float:
        return 3.0

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[int]:
        return iter((3,))

    def __enter__(self) -> float:
        return 3.0

    def __getattr__(self, name: str) -> float:
        return 3.0

    @classmethod
    def of_class(cls) -> float:
        return 3.0

    def method(self) -> float:
        return 3.0


def entered(thing: Any) -> Any:
    with thing as number:
        return number


def matched(thing: Any) -> float:
    match thing:
        case ThreeParent():
            return 3.0
        case _:
            return 2.0


USES: dict[str, Callable[[Any], Any]] = {
    "method": lambda thing: thing.method(),
    "attribute": lambda thing: thing.number,
    "super": lambda thing: thing.by_super(),
    "own object": lambda thing: type(thing)().number,
    "isinstance": lambda thing: 3.0 if isinstance(thing, ThreeParent) else 2.0,
    "issubclass": lambda thing: 3.0 if issubclass(type(thing), ThreeParent) else 2.0,
    "order": lambda thing: type(thing).__mro__[1].number,
    "bases": lambda thing: type(thing).__bases__[0].number,
    "class method": lambda thing: type(thing).of_class(),
    "operator": lambda thing: thing + 1,
    "getattr": lambda thing: thing.nothing_of_this_name,
    "length": lambda thing: len(thing),
    "iteration": lambda thing: sum(thing),
    "truth": lambda thing: 2.0 if thing else 3.0,
    "with": entered,
    "match": matched,
}


@pytest.mark.parametrize("is_above", [False, True], ids=["its bases", "bases of a base"])
@pytest.mark.parametrize("use", USES)
def test_class_that_gets_other_bases_is_noticed(use: str, is_above: bool) -> None:
    if is_above and use in ("order", "bases"):
        pytest.skip("the class itself keeps its bases")

    def make(device: str) -> Scene:
        class Above(TwoParent):
            pass

        class Thing(Above if is_above else TwoParent):  # type: ignore[misc]
            def by_super(self) -> Any:
                return super().method()

        thing = Thing()
        changed: Any = Above if is_above else Thing
        return Scene(
            step=lambda x: x * USES[use](thing),
            change=lambda: setattr(changed, "__bases__", (ThreeParent,)),
        )

    check_replays(make)


def tried(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except (TypeError, AttributeError):
        return 2.0


GETS: dict[str, tuple[Callable[[Any], Any], str, Any]] = {
    "operator": (lambda a: tried(lambda: a + 1), "__add__", lambda s, o: 3.0),
    "length": (lambda a: tried(lambda: len(a)), "__len__", lambda s: 3),
    "truth": (lambda a: 2.0 if a else 3.0, "__bool__", lambda s: False),
    "equality": (lambda a: 3.0 if a == 1 else 2.0, "__eq__", lambda s, o: True),
    "call": (lambda a: 3.0 if callable(a) else 2.0, "__call__", lambda s: 3.0),
    "getattr": (lambda a: tried(lambda: a.missing), "__getattr__", lambda s, n: 3.0),
    "getattribute": (lambda a: a.number, "__getattribute__", lambda s, n: 3.0),
    "property": (lambda a: a.number, "number", property(lambda s: 3.0)),
    "text": (lambda a: 2.0 if f"{a}".startswith("<") else 3.0, "__str__", lambda s: "a"),
    "float": (lambda a: tried(lambda: float(a)), "__float__", lambda s: 3.0),
    "init": (lambda a: type(a)().number, "__init__", lambda s: setattr(s, "number", 3.0)),
    "setattr": (lambda a: set_and_get(type(a)()), "__setattr__", lambda s, n, v: s.__dict__.update({n: 3.0})),
    "names": (lambda a: 3.0 if "added" in dir(type(a)) else 2.0, "added", 1),
}


def set_and_get(thing: Any) -> Any:
    thing.number = 2.0
    return thing.number


@pytest.mark.parametrize("name", GETS)
def test_class_that_gets_a_method_is_noticed(name: str) -> None:
    use, special, value = GETS[name]

    def make(device: str) -> Scene:
        class Plain:
            def __new__(cls) -> Any:
                made = super().__new__(cls)
                made.__dict__["number"] = 2.0
                return made

        thing = Plain()
        return Scene(step=lambda x: x * use(thing), change=lambda: setattr(Plain, special, value))

    check_replays(make)


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("special", ["__getitem__", "__iter__", "__contains__"])
def test_container_whose_class_gets_a_method_is_noticed(kind: type, special: str) -> None:
    uses: dict[str, Callable[[Any], Any]] = {
        "__getitem__": lambda box: box[0],
        "__iter__": lambda box: sum(number for number in box) + 2.0,
        "__contains__": lambda box: 5.0 if 7 in box else 2.0,
    }
    news = {
        "__getitem__": lambda s, k: 3.0,
        "__iter__": lambda s: iter((9,)),
        "__contains__": lambda s, k: True,
    }

    def make(device: str) -> Scene:
        class Box(kind):  # type: ignore[misc, valid-type]
            pass

        box = Box({0: 2.0}) if kind is dict else Box([2.0])
        return Scene(
            step=lambda x: x * uses[special](box), change=lambda: setattr(Box, special, news[special])
        )

    check_replays(make)


def metaclass(use: Callable[[Any], Any], name: str, value: Any) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        class Meta(type):
            number = 2.0

            def __len__(cls) -> int:
                return 2

            def __getitem__(cls, key: Any) -> float:
                return 2.0

            def __getattr__(cls, name: str) -> float:
                return 2.0

            def __instancecheck__(cls, value: Any) -> bool:
                return True

        class Other(Meta):
            number = 3.0

        class Thing(metaclass=Meta):
            pass

        if name == "__class__":
            return Scene(step=lambda x: x * use(Thing), change=lambda: setattr(Thing, name, Other))
        return Scene(step=lambda x: x * use(Thing), change=lambda: setattr(Meta, name, value))

    return make


scene.rows(
    length_of_a_class=metaclass(len, "__len__", lambda cls: 3),
    item_of_a_class=metaclass(lambda kind: kind[0], "__getitem__", lambda cls, key: 3.0),
    missing_name_of_a_class=metaclass(lambda kind: kind.missing, "__getattr__", lambda cls, name: 3.0),
    instance_of_a_class=metaclass(
        lambda kind: 2.0 if isinstance(1, kind) else 3.0, "__instancecheck__", lambda cls, value: False
    ),
    another_metaclass=metaclass(lambda kind: kind.number, "__class__", None),
)


@scene
def descriptor_that_begins_to_come_first(device: str) -> Scene:
    class Descriptor:
        def __get__(self, owner: Any, kind: Any = None) -> float:
            return 3.0

    class Thing:
        number = Descriptor()

    thing = Thing()
    thing.__dict__["number"] = 2.0
    return Scene(
        step=lambda x: x * thing.number,
        change=lambda: setattr(Descriptor, "__set__", lambda s, o, v: None),
    )


@scene
def keywords_of_a_partial_method(device: str) -> Scene:
    class Thing:
        def method(self, number: float) -> float:
            return number

        doubled = functools.partialmethod(method, number=2.0)

    thing = Thing()
    return Scene(
        step=lambda x: x * thing.doubled(),
        change=lambda: Thing.__dict__["doubled"].keywords.update(number=3.0),
    )


@scene
def class_attribute_of_a_tensor(device: str) -> Scene:
    class Weight(torch.Tensor):
        number = 2.0

    weight: Any = torch.ones(3).to(device).as_subclass(Weight)
    return Scene(
        step=lambda x: (x * weight).as_subclass(torch.Tensor) * weight.number,
        change=lambda: setattr(Weight, "number", 3.0),
    )


@scene
def class_that_torch_asks(device: str) -> Scene:
    class Thing:
        number = 2.0

        @classmethod
        def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] * cls.number

    thing: Any = Thing()
    return Scene(step=lambda x: torch.add(x, thing), change=lambda: setattr(Thing, "number", 3.0))


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


# -- modules and builtins ------------------------------------------------------------------------------


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
        _undo.extend((lambda: np.seterr(**errors), lambda: np.set_printoptions(precision=precision)))
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


# -- modes and settings of torch -----------------------------------------------------------------------


class AddsOne(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result + 1 if function is torch.mul else result


class AddsOneBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result + 1 if function is torch.ops.aten.sin.default else result


@contextlib.contextmanager
def setting(change: Callable[[Any], Any], on: Any, off: Any) -> Iterator[None]:
    change(on)
    try:
        yield
    finally:
        change(off)


def gradient(x: Any) -> Any:
    y = x.detach().clone().requires_grad_()
    return torch.autograd.grad(y.sin().sum(), y)[0]


def gradient_of_nothing(x: Any) -> Any:
    y = (x * 0).detach().clone().requires_grad_()
    try:
        return torch.autograd.grad((y.sqrt() * 0).sum(), y)[0]
    except RuntimeError:
        return x * 3


def packed(x: Any) -> Any:
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return gradient(x)
    except RuntimeError:
        return x * 3


class Plain(torch.Tensor):
    pass


def outer(x: Any) -> Any:
    return torch.mm(x.reshape(3, 1), x.reshape(1, 3))


MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch function": (AddsOne, lambda x: torch.mul(x, 3)),
    "dispatch": (AddsOneBelow, torch.sin),
    "default type": (
        lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
        lambda x: torch.ones(3, device=x.device) / 3,
    ),
    "device": (
        lambda: torch.device("meta"),
        lambda x: x * (2.0 if torch.empty(1).device.type == "meta" else 3.0),
    ),
    "default device": (
        lambda: setting(torch.set_default_device, "meta", None),
        lambda x: x * (2.0 if torch.empty(1).device.type == "meta" else 3.0),
    ),
    "no grad": (
        torch.no_grad,
        lambda x: x * (2.0 if (x.detach().requires_grad_() * 2).requires_grad else 3.0),
    ),
    "inference": (torch.inference_mode, lambda x: x * (2.0 if (x * 1).is_inference() else 3.0)),
    "hooks of saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t),
        gradient,
    ),
    "no hooks of saved tensors": (lambda: torch.autograd.graph.disable_saved_tensors_hooks("no"), packed),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), gradient_of_nothing),
    "deterministic": (
        lambda: setting(torch.use_deterministic_algorithms, True, False),
        lambda x: x * (2.0 if torch.are_deterministic_algorithms_enabled() else 3.0),
    ),
    "unfilled memory": (
        lambda: setting(torch._C._set_deterministic_fill_uninitialized_memory, False, True),
        lambda x: x * (2.0 if torch.utils.deterministic.fill_uninitialized_memory else 3.0),  # type: ignore[attr-defined]
    ),
    "autocast": (lambda: torch.autocast("cpu"), outer),
    "type of autocast": (lambda: torch.autocast("cpu", dtype=torch.float16), outer),
    "attention": (
        lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
        lambda x: nn.functional.scaled_dot_product_attention(*[x.reshape(1, 1, 3, 1).repeat(1, 1, 1, 8)] * 3),
    ),
    "denormals": (
        lambda: setting(torch.set_flush_denormal, True, False),
        lambda x: x * 1e-38 * 1e-3 * 1e30,
    ),
    "subclasses": (
        torch._C.DisableTorchFunctionSubclass,
        lambda x: x * (2.0 if type(x.as_subclass(Plain) * 2) is Plain else 3.0),
    ),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("is_left", [False, True], ids=["entered", "left"])
@pytest.mark.parametrize("name", MODES)
def test_mode_between_two_calls_is_noticed(name: str, is_left: bool) -> None:
    enter, step = MODES[name]

    def make(device: str) -> Scene:
        restore()
        stack = contextlib.ExitStack()
        _undo.append(stack.close)
        if is_left:
            stack.enter_context(enter())

        def arguments(number: int) -> tuple[Any, ...]:
            return (torch.linspace(-1, 1, 3, device="cpu", dtype=torch.float32) + number,)

        return Scene(
            step=step,
            change=stack.close if is_left else lambda: stack.enter_context(enter()),
            arguments=arguments,
        )

    step_function, replays = check_right(make)
    assert replays[-1] or len(step_function.explain().splitlines()) > 1
    if name != "anomaly":  # which looks for NaNs, and so waits
        assert replays[5] >= 2, step_function.explain()
        assert replays[-1] > replays[5], step_function.explain()


@pytest.mark.parametrize("make", scene.parameters)
def test_change_is_noticed_and_replayed(make: Any) -> None:
    check_replays(make)


@pytest.mark.parametrize("make", refused.parameters)
def test_change_is_noticed_or_refused(make: Any) -> None:
    check_right_or_refused(make)
