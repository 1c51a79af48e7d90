"""Where a step has its tensors and generators from: defaults, partials, sets, keys, weak references, methods.

Whatever holds one, a replay uses the current one, or the step is not replayed and says so.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import enum
import functools
import itertools
import operator
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from .scenes import Scene, check_right_or_refused

# A way to hold a tensor: makes the step's function, which multiplies by it.
Hold = Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
HOLD: dict[str, Hold] = {}


def hold(make: Hold) -> Hold:
    HOLD[make.__name__] = make
    return make


def reached_by(get: Callable[[Any], Any], put: Callable[[torch.Tensor], Any]) -> Hold:
    """The tensor is put somewhere outside, and the step gets it from there."""

    def make(w: torch.Tensor) -> Any:
        somewhere = put(w)
        return lambda x: x * get(somewhere)

    return make


def times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


class Pair(NamedTuple):
    number: int
    w: torch.Tensor


class Slots:
    __slots__ = ("__weakref__", "w")

    def __init__(self, w: torch.Tensor) -> None:
        self.w = w


class Owner:
    def __init__(self, w: torch.Tensor) -> None:
        self.w = w

    def get(self) -> torch.Tensor:
        return self.w

    @functools.cached_property
    def cached(self) -> torch.Tensor:
        return self.w

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.w

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield self.w

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


class Through:
    """A descriptor that has the tensor itself."""

    def __init__(self, w: torch.Tensor) -> None:
        self.w = w

    def __get__(self, owner: Any, kind: Any = None) -> torch.Tensor:
        return self.w


def local_with(w: torch.Tensor) -> threading.local:
    local = threading.local()
    local.w = w
    return local


def variable_with(w: torch.Tensor) -> contextvars.ContextVar[torch.Tensor]:
    variable: contextvars.ContextVar[torch.Tensor] = contextvars.ContextVar("w")
    variable.set(w)
    return variable


def only(values: Any) -> Any:
    (one,) = values
    return one


HOLD |= {
    "set": reached_by(only, lambda w: {w}),
    "frozen set": reached_by(only, lambda w: frozenset([w])),
    "dict key": reached_by(only, lambda w: {w: 2.0}),
    "ordered dict key": reached_by(lambda d: next(iter(d)), lambda w: collections.OrderedDict({w: 1})),
    "counter": reached_by(only, lambda w: collections.Counter([w])),
    "tuple in a set": reached_by(lambda s: only(s)[0], lambda w: {(w, 1)}),
    "named tuple": reached_by(lambda pair: pair.w, lambda w: Pair(1, w)),
    "nested": reached_by(lambda d: d["a"][0][1], lambda w: {"a": [(1, w)]}),
    "proxy of a dict": reached_by(lambda p: p["w"], lambda w: types.MappingProxyType({"w": w})),
    "chain map": reached_by(lambda m: m["w"], lambda w: collections.ChainMap({}, {"w": w})),
    "user dict": reached_by(lambda m: m["w"], lambda w: collections.UserDict(w=w)),
    "user list": reached_by(lambda m: m[0], lambda w: collections.UserList([w])),
    "deque": reached_by(lambda q: q[-1], lambda w: collections.deque([w])),
    "values of a dict": reached_by(only, lambda w: {"w": w}.values()),
    "array of objects": reached_by(lambda a: a[0], lambda w: objects_with(w)),
    "weak reference": reached_by(lambda pair: pair[0](), lambda w: (weakref.ref(w), [w])),
    "weak set": reached_by(lambda pair: only(pair[0]), lambda w: (weakref.WeakSet([w]), [w])),
    "weak value": reached_by(
        lambda pair: pair[0]["w"], lambda w: (weakref.WeakValueDictionary({"w": w}), [w])
    ),
    "weak proxy": reached_by(lambda pair: pair[0].w, lambda w: (weakref.proxy(slots := Slots(w)), [slots])),
    "weak method": reached_by(
        lambda pair: pair[0]()(), lambda w: (weakref.WeakMethod((owner := Owner(w)).get), [owner])
    ),
    "bound method": reached_by(lambda get: get(), lambda w: Owner(w).get),
    "method in a list": reached_by(lambda gets: gets[0](), lambda w: [Owner(w).get]),
    "cached property": reached_by(lambda owner: owner.cached, Owner),
    "item by a method": reached_by(lambda owner: owner["w"], Owner),
    "iteration by a method": reached_by(only, Owner),
    "descriptor": reached_by(lambda owner: owner.w, lambda w: type("Own", (), {"w": Through(w)})()),
    "attribute of a function": reached_by(lambda f: f.w, lambda w: function_with(w)),
    "attribute of a tensor": reached_by(lambda t: t.w, lambda w: tensor_with(w)),
    "attribute of a class": reached_by(lambda c: c.w, lambda w: type("Own", (), {"w": w})),
    "attribute of a metaclass": reached_by(
        lambda c: c.w, lambda w: type("Meta", (type,), {"w": w})("Own", (), {})
    ),
    "enumeration": reached_by(lambda e: e.A.value, lambda w: enum.Enum("Own", {"A": w})),
    "thread's own": reached_by(lambda local: local.w, local_with),
    "context variable": reached_by(lambda variable: variable.get(), variable_with),
    "object.__getattribute__": reached_by(lambda o: object.__getattribute__(o, "w"), Owner),
    "slot's descriptor": reached_by(lambda o: Slots.w.__get__(o), Slots),  # type: ignore[attr-defined]
    "vars": reached_by(lambda o: vars(o)["w"], Owner),
    "attribute getter": reached_by(operator.attrgetter("w"), Owner),
    "item getter": reached_by(operator.itemgetter(0), lambda w: [w]),
    "computed name": reached_by(lambda o: getattr(o, "".join(["w"])), Owner),
    "copied object": reached_by(lambda o: copy.copy(o).w, Owner),
    "copied list": reached_by(lambda o: o.copy()[0], lambda w: [w]),
    "sorted": reached_by(lambda o: sorted(o, key=lambda pair: pair[0])[0][1], lambda w: [(2, 0), (1, w)]),
    "cache of a function": reached_by(lambda get: get(), lambda w: functools.cache(lambda: w)),
    "iterator": reached_by(next, lambda w: iter([w] * 99)),
    "repeat": reached_by(next, itertools.repeat),
    "cycle": reached_by(next, lambda w: itertools.cycle([w])),
    "generator": reached_by(next, lambda w: (w for _ in range(99))),
    "map": reached_by(next, lambda w: map(w.view, [3] * 99)),
    "parameter list": reached_by(lambda m: m[0].detach(), lambda w: nn.ParameterList([nn.Parameter(w)])),
    "optimizer's group": reached_by(
        lambda o: o.param_groups[0]["params"][0], lambda w: torch.optim.SGD([w], lr=1.0)
    ),
}


def objects_with(w: torch.Tensor) -> Any:
    array = np.empty(1, dtype=object)
    array[0] = w
    return array


def function_with(w: torch.Tensor) -> Any:
    def function() -> None: ...

    function.w = w  # type: ignore[attr-defined]
    return function


def tensor_with(w: torch.Tensor) -> Any:
    tensor: Any = torch.zeros(1).to(w.device)
    tensor.w = w
    return tensor


@hold
def default(w: torch.Tensor) -> Any:
    def function(x: torch.Tensor, w: torch.Tensor = w) -> torch.Tensor:
        return x * w

    return function


@hold
def keyword_default(w: torch.Tensor) -> Any:
    def function(x: torch.Tensor, *, w: torch.Tensor = w) -> torch.Tensor:
        return x * w

    return function


@hold
def default_of_what_is_called(w: torch.Tensor) -> Any:
    called = default(w)
    return lambda x: called(x)


@hold
def default_of_a_lambda_inside(w: torch.Tensor) -> Any:
    return lambda x: (lambda y, w=w: y * w)(x)


@hold
def default_of_a_method(w: torch.Tensor) -> Any:
    class Model:
        def run(self, x: torch.Tensor, w: torch.Tensor = w) -> torch.Tensor:
            return x * w

    return Model().run


@hold
def default_in_a_container(w: torch.Tensor) -> Any:
    def function(x: torch.Tensor, options: Any = {"w": [w]}) -> torch.Tensor:  # noqa: B006
        return x * options["w"][0]

    return function


HOLD |= {
    "partial": lambda w: functools.partial(times, w),
    "partial by keyword": lambda w: functools.partial(times, w=w),
    "partial that is called": reached_by(lambda get: get(), lambda w: functools.partial(lambda v: v, w)),
    "partial of a partial": lambda w: functools.partial(functools.partial(times, w=w)),
    "partial in a container": reached_by(
        lambda gets: gets["get"](), lambda w: {"get": functools.partial(lambda v: v[0], [w])}
    ),
    "method of the tensor": lambda w: lambda x, multiply=w.mul: multiply(x),
    "method of the tensor as a variable": reached_by(lambda get: get(), lambda w: w.detach),
    "partial of an operator": lambda w: functools.partial(torch.mul, w),
    "operator of an object": lambda w: functools.partial(operator.matmul, Owner(w)),
    "reduce": lambda w: lambda x: functools.reduce(times, [w, x]),
}


def overwrite(w: torch.Tensor) -> None:
    with torch.no_grad():
        w.mul_(3)


def exchange_data(w: torch.Tensor) -> None:
    w.data = torch.full((3,), 7.0).to(w.device)


@pytest.mark.parametrize("change", [overwrite, exchange_data])
@pytest.mark.parametrize("kind", HOLD)
def test_tensor_is_not_frozen(kind: str, change: Callable[[torch.Tensor], None]) -> None:
    def make(device: str) -> Scene:
        w = torch.full((3,), 2.0).to(device)
        return Scene(HOLD[kind](w), lambda: change(w))

    check_right_or_refused(make)


# What holds the tensor, how the step gets it, and how another one is put there.
REPLACE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "default": (default, lambda f: f(1), lambda f, v: setattr(f, "__defaults__", (v,))),
    "keyword default": (keyword_default, lambda f: f(1), lambda f, v: f.__kwdefaults__.update(w=v)),
    "partial": (
        lambda w: functools.partial(times, 1, w),
        lambda p: p(),
        lambda p, v: p.__setstate__((times, (1, v), {}, {})),
    ),
    "keyword of a partial": (
        lambda w: functools.partial(times, w=w),
        lambda p: p(1),
        lambda p, v: p.keywords.update(w=v),
    ),
    "set": (lambda w: {w}, only, lambda s, v: (s.clear(), s.add(v))),
    "dict key": (lambda w: {w: 1}, only, lambda d, v: (d.clear(), d.update({v: 1}))),
    "weak set": (lambda w: weakref.WeakSet([w]), only, lambda s, v: (s.clear(), s.add(v))),
    "deque": (lambda w: collections.deque([w], 1), lambda q: q[0], lambda q, v: q.append(v)),
    "optimizer's group": (
        lambda w: torch.optim.SGD([w], lr=1.0),
        lambda o: o.param_groups[0]["params"][0],
        lambda o, v: o.param_groups[0]["params"].__setitem__(0, v),
    ),
    "optimizer's state": (
        lambda w: with_state(w),
        lambda o: next(iter(o.state.values()))["average"],
        lambda o, v: next(iter(o.state.values())).update(average=v),
    ),
    "owner of a method": (
        lambda w: Owner(w).get,
        lambda get: get(),
        lambda get, v: setattr(get.__self__, "w", v),
    ),
    "cell of a function": (
        lambda w: lambda: w,
        lambda get: get(),
        lambda get, v: setattr(get.__closure__[0], "cell_contents", v),
    ),
    "parameter list": (
        lambda w: nn.ParameterList([nn.Parameter(w)]),
        lambda m: m[0].detach(),
        lambda m, v: m.__setitem__(0, nn.Parameter(v)),
    ),
}


def with_state(w: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([w], lr=1.0)
    optimizer.state[w]["average"] = w
    return optimizer


@pytest.mark.parametrize("kind", REPLACE)
def test_tensor_that_is_replaced_is_noticed(kind: str) -> None:
    put, get, replace = REPLACE[kind]

    def make(device: str) -> Scene:
        w, v = (torch.full((3,), number).to(device) for number in (2.0, 5.0))
        holder = put(w)
        # Asked for what it keeps, the scene keeps both: some are only weakly held.
        return Scene(lambda x: x * get(holder), lambda: replace(holder, v), kept=lambda: (w, v))

    check_right_or_refused(make)


# -- generators ------------------------------------------------------------------------------------

Draw = Callable[[Any, str], Any]
GENERATORS: dict[str, tuple[Callable[[], Any], Draw]] = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g, d: torch.rand(3, generator=g, device=d)),
    "torch on the host": (
        lambda: torch.Generator().manual_seed(3),
        lambda g, d: torch.rand(3, generator=g).to(d),
    ),
    "numpy": (lambda: np.random.default_rng(3), lambda g, d: g.random()),
    "numpy's old": (lambda: np.random.RandomState(3), lambda g, d: g.rand()),
    "python": (lambda: random.Random(3), lambda g, d: g.random()),
}
HOLD_GENERATOR: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "variable": (lambda g: g, lambda g: g),
    "default": (lambda g: lambda g=g: g, lambda get: get()),
    "partial": (lambda g: functools.partial(lambda g: g, g), lambda get: get()),
    "list": (lambda g: [g], lambda held: held[0]),
    "set": (lambda g: {g}, only),
    "dict key": (lambda g: {g: 1}, only),
    "weak reference": (lambda g: (weakref.ref(owner := Owner(g)), [owner]), lambda held: held[0]().w),
    "method": (lambda g: Owner(g).get, lambda get: get()),
    "slots": (Slots, lambda held: held.w),
}


@pytest.mark.parametrize("holder", HOLD_GENERATOR)
@pytest.mark.parametrize("kind", GENERATORS)
def test_generator_is_not_frozen(kind: str, holder: str) -> None:
    make_generator, draw = GENERATORS[kind]
    put, get = HOLD_GENERATOR[holder]

    def make(device: str) -> Scene:
        generator = make_generator()
        held = put(generator)
        return Scene(lambda x: x * draw(get(held), device), kept=lambda: draw(generator, "cpu"))

    check_right_or_refused(make)


BOUND_DRAWS: dict[str, Callable[[], Callable[[], float]]] = {
    "python": lambda: random.Random(3).random,
    "python's, partial": lambda: functools.partial(random.Random(3).uniform, 1.0, 2.0),
    "numpy": lambda: np.random.default_rng(3).random,
    "numpy's old": lambda: np.random.RandomState(3).rand,
}


@pytest.mark.parametrize("kind", BOUND_DRAWS)
def test_method_of_a_generator_is_not_frozen(kind: str) -> None:
    def make(device: str) -> Scene:
        draw = BOUND_DRAWS[kind]()
        return Scene(lambda x, draw=draw: x * draw())

    check_right_or_refused(make)


# Made inside. What is drawn is the same in each call, until the seed changes.
MADE_INSIDE: dict[str, Callable[[Any, str], Any]] = {
    "seeded": lambda seed, d: torch.rand(3, generator=torch.Generator().manual_seed(seed), device=d),
    "not seeded": lambda seed, d: torch.rand(3, generator=torch.Generator(), device=d) * seed,
    "on the host": lambda seed, d: torch.rand(3, generator=torch.Generator().manual_seed(seed)).to(d),
    "normal": lambda seed, d: torch.empty(3).normal_(generator=torch.Generator().manual_seed(seed)).to(d),
    "in place": lambda seed, d: torch.empty(3, device=d).uniform_(
        generator=torch.Generator().manual_seed(seed)
    ),
    "permutation": lambda seed, d: torch.randperm(3, generator=torch.Generator().manual_seed(seed), device=d),
    "twice": lambda seed, d: torch.stack(
        [torch.rand(3, generator=g, device=d) for g in [torch.Generator().manual_seed(seed)] * 2]
    ).sum(0),
    "with a state": lambda seed, d: torch.rand(3, generator=generator_like(seed), device=d),
    "python": lambda seed, d: random.Random(seed).random(),
    "numpy": lambda seed, d: np.random.default_rng(seed).random(),
}


def generator_like(seed: int) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch.Generator().manual_seed(seed).get_state())
    return generator


@pytest.mark.parametrize("kind", MADE_INSIDE)
def test_generator_that_is_made_inside(kind: str) -> None:
    def make(device: str) -> Scene:
        box = types.SimpleNamespace(seed=3)
        return Scene(
            lambda x: x * MADE_INSIDE[kind](box.seed, device),
            lambda: setattr(box, "seed", 4),
            kept=lambda: torch.rand(1),  # the default generator is where it would be
        )

    check_right_or_refused(make)
