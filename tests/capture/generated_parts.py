"""The parts of generated step functions, as tables of templates: see `generated.py`.

A table begins with its simplest row, because hypothesis shrinks to the first. In templates:

    held@                 a name of the holder: the second holder of a case gets names of its own
    INIT, NEW             the first value, and the next one, as source
    READ                  the expression that reads the value from its holder
    OWNER.ATTR            where the value is an attribute
    CONTAINER[KEY]        where it is an item
    MEMBERS               an iterable with the value as its first member
    v, x, y               the value, the step's argument, the result
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from typing import Any

# -- values ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Value:
    """A kind of value: examples of it, what a step computes with one, and how one changes."""

    name: str
    options: tuple[str, ...]  # different ones, as source
    uses: tuple[str, ...]  # a tensor of `x` and `v`
    advances: tuple[str, ...] = ()  # the next value, from `v` and perhaps `x`
    mutations: tuple[str, ...] = ()  # statements that change `v` itself
    traits: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return self.name


def _value(name: str, traits: str, *options: str, **more: Any) -> Value:
    return Value(name, options, traits=frozenset(traits.split()), **more)


NUMBER_USES = (
    "x * v",
    "x + v",
    "(x > 0).to(torch.int64) * v",
    "torch.full_like(x, v)",
    "x * (2 if v > 2 else 3)",
    "x * (2 if v == 2 else 3)",
    "x * (2 if isinstance(v, int) else 3)",
    "x * (2 if type(v) is float else 3)",
    "x * (2 if v else 3)",
    "x * (2 if v in (2, 5) else 3)",
    "x * float(f'{v}')",
    "x * len(f'{v!r}')",
    "x * math.copysign(1.0, v)",
    "x * sum([v, v])",
    "x * max(v, 1)",
    "x.clamp(max=v)",
    "x * {2: 1.5, 3: 2.5}.get(v, 3.5)",
    "x * matched(v)",
    "x + torch.tensor([v, v, v], dtype=torch.float32).to(x.device)",
    "x[: len([one for one in (1, 2, 3) if one < v])]",
)
NUMBER_ADVANCES = ("v + 1", "v - 1", "v * 2", "-v", "v / 2", "v % 3 + 1", "float(v)", "5 - v")
TENSOR_USES = (
    "x * v.to(x.device)",
    "x + v.to(x.device).sum()",
    "x * v.shape[0]",
    "x.to(v.dtype)",
    "x * (2 if v.requires_grad else 3)",
    "x * (2 if v.dtype is torch.float32 else 3)",
    "x * len(v)",
    "x * v.dim()",
    "x * (2 if isinstance(v, nn.Parameter) else 3)",
    "x * (2 if v.is_leaf else 3)",
    "x * (2 if v.grad is None else 3)",
    "torch.zeros_like(v.to(x.device)) + x[0]",
    "v.to(x.device) - x[0]",
    "x + sum(one.sum() for one in v.to(x.device))",
    "(v.to(x.device) * x[0]).t()",
)
TENSOR_ADVANCES = ("v * 0.5", "v.clone()", "v.detach() * 0.5 + x.to(v.device).sum()", "v[:1]", "v.double()")
TENSOR_MUTATIONS = (
    "v.mul_(2)",
    "v.data = v.data * 3",
    "v.data.add_(1)",
    "v.requires_grad_(not v.requires_grad)",
    "v.data = torch.ones(2, 3, device=v.device)",
    "v.data = v.data.double()",
    "v.grad = None if v.grad is not None else torch.ones_like(v)",
    "v.copy_(v + 1)",
    "v.zero_()",
    "v[0] = 7.0",
    "v.t_()",
    "v.detach().mul_(3)",
    "v.register_hook(lambda g: g * 2)",
)
LIST_USES = (
    "x * v[0]",
    "x * sum(v)",
    "x * len(v)",
    "x * sorted(v)[0]",
    "x * max(v)",
    "x * (2 if 2.0 in v else 3)",
    "x * (2 if v else 3)",
    "x * [a * b for a, b in zip(v, v)][-1]",
    "x * sum(map(abs, v))",
    "x * (lambda first, *rest: first + len(rest))(*v)",
    "x * [*v][-1]",
    "x * functools.reduce(operator.add, v)",
    "x * matched(v)",
    "x * float(f'{v[0]}')",
    "x + torch.tensor(v, dtype=torch.float32).to(x.device).sum()",
    "x * (2 if any(one > 2 for one in v) else 3)",
)

VALUES = (
    _value(
        "float",
        "number float plain hashable numeric",
        "2.0",
        "3.0",
        "5.0",
        uses=NUMBER_USES,
        advances=NUMBER_ADVANCES,
    ),
    _value(
        "int",
        "number int plain hashable byte numeric",
        "2",
        "3",
        "5",
        uses=(*NUMBER_USES, "x.repeat(v)", "x[v % 3]"),
        advances=(*NUMBER_ADVANCES[:6], "v + True", "int(v)"),
    ),
    _value(
        "odd float",
        "number float plain hashable numeric",
        "0.0",
        "-0.0",
        "float('nan')",
        "float('inf')",
        uses=(*NUMBER_USES[:13], "x / v", "torch.where(x > v, x, 1.0)"),
        advances=("-v", "v + 1"),
    ),
    _value(
        "number of changing type",
        "number plain hashable",
        "2",
        "2.0",
        "True",
        "np.float64(2.0)",
        "1",
        uses=NUMBER_USES[:16],
        advances=("float(v)", "int(v)", "v + 1", "not v"),
    ),
    _value(
        "bool",
        "number plain hashable byte",
        "True",
        "False",
        uses=NUMBER_USES[:16],
        advances=("not v", "v + 1"),
    ),
    _value(
        "str",
        "plain hashable text",
        "'sin'",
        "'cos'",
        "'tanh'",
        uses=(
            "x * (2 if v == 'sin' else 3)",
            "getattr(torch, v)(x)",
            "x * len(v)",
            "x * {'sin': 2, 'cos': 4}.get(v, 3)",
            "x * (2 if v.startswith('s') else 3)",
            "x * (2 if 'n' in v else 3)",
            "x * ord(v[0])",
            "x * (2 if f'{v}!' == 'sin!' else 3)",
            "x * matched(v)",
            "x * sorted(v).index(min(v))",
            "x * (2 if isinstance(v, str) else 3)",
        ),
        advances=("v[1:] + v[0]", "'cos' if v == 'sin' else 'sin'"),
    ),
    _value(
        "None or a number",
        "plain hashable",
        "None",
        "2.0",
        "3",
        uses=(
            "x + 1 if v is None else x * v",
            "x if v is None else x * v",
            "x * (2 if v is None else 3)",
            "x * (v or 4)",
            "x * (2 if v is not None and v > 2 else 3)",
            "x * (2 if isinstance(v, float) else 3)",
            "x * matched(v)",
        ),
        advances=("None if v else 2.0", "(v or 0) + 1"),
    ),
    _value(
        "lazy tensor",
        "tensor hashable",
        "torch.full((3,), 2.0).to(DEVICE)",
        "torch.full((3,), 3.0).to(DEVICE)",
        "torch.full((1,), 3, dtype=torch.int64).to(DEVICE)",
        "torch.arange(6.0).reshape(2, 3).to(DEVICE)",
        "torch.arange(9.0).reshape(3, 3).t().to(DEVICE)",
        uses=TENSOR_USES,
        advances=TENSOR_ADVANCES,
        mutations=TENSOR_MUTATIONS,
    ),
    _value(
        "CPU tensor",
        "tensor hashable cpu",
        "torch.full((3,), 2.0)",
        "torch.full((3,), 3.0)",
        "torch.full((1,), 3, dtype=torch.int64)",
        "torch.arange(6.0).reshape(2, 3)",
        "torch.tensor(4.0).expand(3)",
        uses=(*TENSOR_USES, "x * v.sum().item()", "x * (2 if v.sum() > 6 else 3)", "x * len(v.tolist())"),
        advances=TENSOR_ADVANCES,
        mutations=(*TENSOR_MUTATIONS, "v.detach().numpy()[...] = 7"),
    ),
    _value(
        "None or a tensor",
        "hashable",
        "None",
        "torch.full((3,), 2.0).to(DEVICE)",
        "torch.full((3,), 3.0).to(DEVICE)",
        uses=(
            "x + 1 if v is None else x * v",
            "x if v is None else x * v",
            "x * (2 if v is None else 3)",
            "x * (2 if isinstance(v, torch.Tensor) else 3)",
        ),
        advances=("x.detach() if v is None else v * 0.5 + x", "x.detach() if v is None else None", "x * 2"),
    ),
    _value(
        "parameter",
        "tensor parameter hashable",
        "nn.Parameter(torch.full((3,), 2.0).to(DEVICE))",
        "nn.Parameter(torch.full((3,), 3.0).to(DEVICE))",
        "nn.Parameter(torch.ones(1, 3).to(DEVICE))",
        "nn.Parameter(torch.ones(3).to(DEVICE), requires_grad=False)",
        uses=(*TENSOR_USES, "torch.autograd.grad((x * v).sum(), v)[0]"),
        advances=("nn.Parameter(v.detach() * 0.5)", "nn.Parameter(v.detach() + x.sum())"),
        mutations=(*TENSOR_MUTATIONS[1:7], "v.register_hook(lambda g: g * 2)"),
    ),
    _value(
        "callable",
        "callable hashable",
        "torch.sin",
        "torch.cos",
        "(lambda x: x * 3)",
        "functools.partial(torch.mul, other=2)",
        "torch.Tensor.tanh",
        "Scale(2.0)",
        uses=("v(x)", "[*map(v, [x])][0]", "x * len(getattr(v, '__name__', '?'))", "v(v(x))"),
    ),
    _value(
        "dtype",
        "plain hashable",
        "torch.float32",
        "torch.float64",
        "torch.int64",
        uses=(
            "(x + 1).to(v)",
            "x.to(v)",
            "torch.zeros(3, dtype=v, device=x.device)",
            "x * (2 if v.is_floating_point else 3)",
            "x * (2 if v is torch.float32 else 3)",
            "x * v.itemsize",
            "x * len(str(v))",
        ),
        advances=("torch.float64 if v is torch.float32 else torch.float32",),
    ),
    _value(
        "list of numbers",
        "container",
        "[2.0]",
        "[3.0, 4.0]",
        "[3.0]",
        "[2, 3.0, 5.0]",
        "[]",
        uses=LIST_USES,
        advances=("v + [2.0]", "v[1:] + v[:1]", "[one + 1 for one in v]", "v[::-1]", "v[:1]"),
        mutations=(
            "v.append(2.0)",
            "v.insert(0, 7.0)",
            "v.pop()",
            "v[0] = v[0] + 1",
            "v[0] += 1",
            "v.reverse()",
            "v.clear()",
            "del v[0]",
            "v[:] = [6.0]",
            "v.append(v.pop(0))",
            "v.__iadd__([1.0])",
        ),
    ),
    _value(
        "tuple of numbers",
        "container hashable plain",
        "(2.0,)",
        "(3.0, 4.0)",
        "(3.0,)",
        "(2, 3.0)",
        "(2,)",
        uses=LIST_USES,
        advances=("v + (2.0,)", "v[1:] + v[:1]", "v[:1]"),
    ),
    _value(
        "dict of numbers",
        "container",
        "{'a': 2.0}",
        "{'a': 3.0, 'b': 4.0}",
        "{'b': 4.0, 'a': 3.0}",
        "{'a': 2}",
        uses=(
            "x * v['a']",
            "x * sum(v.values())",
            "x * len(v)",
            "x * (2 if 'b' in v else 3)",
            "x * (2 if [*v][0] == 'a' else 3)",
            "x * v.get('b', 7)",
            "scaled(x, **v)",
            "x * [value for key, value in v.items()][0]",
            "x * sorted(v.values())[0]",
            "x * matched(v)",
        ),
        advances=("{**v, 'a': v['a'] + 1}", "v | {'b': 5.0}"),
        mutations=(
            "v['a'] = v['a'] + 1",
            "v.update(b=6.0)",
            "v.pop('b', None)",
            "v.__setitem__('a', v.pop('a'))",
            "v.setdefault('b', 8.0)",
            "v['a'] *= 2",
        ),
    ),
    _value(
        "list of tensors",
        "container",
        "[torch.full((3,), 2.0).to(DEVICE)]",
        "[torch.full((3,), 3.0).to(DEVICE), torch.ones(3).to(DEVICE)]",
        "[torch.ones(3).to(DEVICE)] * 2",
        uses=(
            "x * v[0]",
            "x * torch.stack(v).sum()",
            "x * len(v)",
            "functools.reduce(torch.mul, v, x)",
            "x * sum(one.sum() for one in v)",
            "x * v[-1] + 10 * v[0]",
        ),
        advances=("[*v[1:], v[0] * 2]", "[one * 0.5 for one in v]", "v[::-1]"),
        mutations=(
            "v[0] = v[0] * 0.5",
            "v[0].mul_(2)",
            "v.append(v[0])",
            "v.append(v[0] * 2)",
            "v.reverse()",
            "v.pop()",
            "v[0] = v[-1]",
            "v[-1].data = v[-1] * 2",
        ),
    ),
    _value(
        "dict of tensors",
        "container",
        "{'a': torch.full((3,), 2.0).to(DEVICE)}",
        "{'a': torch.full((3,), 3.0).to(DEVICE), 'b': torch.ones(3).to(DEVICE)}",
        uses=("x * v['a']", "x * sum(v.values())", "x * len(v)", "x * v.get('b', v['a'])"),
        advances=("{key: one * 2 for key, one in v.items()}",),
        mutations=(
            "v['a'] = v['a'] * 0.5",
            "v['a'].add_(1)",
            "v.update(b=v['a'])",
            "v.update(b=v['a'] + 1)",
            "v.pop('b', None)",
        ),
    ),
    _value(
        "tuple of tensors",
        "container hashable",
        "(torch.full((3,), 2.0).to(DEVICE), torch.ones(3).to(DEVICE))",
        "(torch.full((3,), 3.0).to(DEVICE), torch.ones(3).to(DEVICE))",
        "(torch.full((3,), 3.0).to(DEVICE),)",
        uses=("x * v[0] + 10 * v[-1]", "x * len(v)", "functools.reduce(torch.mul, v, x)"),
        advances=("(v[0] * 0.5, *v[1:])", "v[::-1]", "(*v[1:], v[0] + x)"),
        mutations=("v[0].mul_(2)", "v[-1].data = v[0].data * 3"),
    ),
    _value(
        "module",
        "module hashable",
        "layer(2.0)",
        "layer(3.0)",
        "nn.Sequential(layer(2.0), nn.Tanh())",
        "nn.Tanh()",
        uses=(
            "v(x)",
            "x * (2 if v.training else 3)",
            "x * len(list(v.parameters()))",
            "x + sum(one.sum() for one in v.parameters())",
            "x * len(v.state_dict())",
            "nn.functional.dropout(x, 0.5, v.training)",
            "x * (2 if isinstance(v, nn.Linear) else 3)",
            "torch.func.functional_call(v, {}, (x,))",
            "x * len([*v.modules()])",
            "x * (2 if any(p.requires_grad for p in v.parameters()) else 3)",
        ),
        mutations=(
            "v.train(not v.training)",
            "[p.data.mul_(2) for p in v.parameters()]",
            "v.requires_grad_(not all(p.requires_grad for p in v.parameters()))",
            "v.register_forward_hook(lambda module, inputs, output: output * 2)",
            "v.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))",
            "v.register_parameter('bias', nn.Parameter(torch.ones(3).to(DEVICE)))",
            "v.register_buffer('more', torch.ones(3).to(DEVICE))",
            "v.load_state_dict({key: one * 2 for key, one in v.state_dict().items()})",
            "v.register_module('child', nn.Identity())",
            "v._forward_hooks.clear()",
        ),
    ),
    _value(
        "dropout or batch norm",
        "module hashable",
        "nn.Dropout(0.5)",
        "nn.Dropout(1.0)",
        "norm()",
        uses=("v(x.reshape(1, 3, 1).expand(2, 3, 1))", "x * (2 if v.training else 3)"),
        mutations=(
            "v.train(not v.training)",
            "v.eval()",
            "setattr(v, 'p', 0.25)",
            "setattr(v, 'momentum', 0.5)",
        ),
    ),
    _value(
        "generator",
        "hashable generator",
        "torch.Generator().manual_seed(2)",
        "torch.Generator().manual_seed(3)",
        uses=(
            "x + torch.rand(3, generator=v).to(x.device)",
            "x + torch.rand(3, generator=v, device=x.device)",
            "x * v.initial_seed()",
            "torch.empty_like(x).normal_(generator=v)",
        ),
        mutations=("v.manual_seed(7)", "v.seed() and v.manual_seed(8)", "torch.rand(2, generator=v)"),
    ),
    _value(
        "object",
        "hashable",
        "Scale(2.0)",
        "Scale(3.0)",
        "Scale(2)",
        "Slots(4.0)",
        uses=(
            "v(x)",
            "x * v.scale",
            "x * (2 if isinstance(v, Scale) else 3)",
            "x * len(v)",
            "x * (2 if v else 3)",
        ),
        advances=("Scale(v.scale + 1)", "type(v)(v.scale)"),
        mutations=("v.scale += 1", "v.scale = 6.0", "v.scale = int(v.scale)", "del v.scale"),
    ),
    _value(
        "enum member",
        "plain hashable",
        "Mode.A",
        "Mode.B",
        uses=(
            "x * v.value",
            "x * (2 if v is Mode.A else 3)",
            "x * len(v.name + v.name * v.value)",
            "x * matched(v)",
        ),
        advances=("Mode.B if v is Mode.A else Mode.A",),
    ),
    _value(
        "seed",
        "number int plain hashable",
        "2",
        "3",
        uses=("x + (torch.manual_seed(v), torch.rand(3, device=x.device))[1]",),
        advances=("v + 1", "5 - v"),
    ),
    _value(
        "slice, range or shape",
        "plain",
        "slice(0, 2)",
        "slice(1, 3)",
        "range(2)",
        "range(1, 3)",
        "torch.Size([2])",
        uses=(
            "x[v] if isinstance(v, slice) else x * len(v)",
            "x * (v.stop if isinstance(v, slice | range) else 7)",
            "x * (2 if isinstance(v, range) else 3)",
            "x * len(f'{v}')",
        ),
        advances=("slice(1, 2)", "range(2, 3)"),
    ),
    _value(
        "NumPy array as a value",
        "array",
        "np.array([2.0, 3.0, 4.0])",
        "np.array([5.0, 3.0, 4.0])",
        "np.array([2, 3, 4])",
        "np.float32(2.0).reshape(1)",
        uses=(
            "x * v[0].item()",
            "x + torch.from_numpy(v).to(x.device)",
            "x * float(v.sum())",
            "x * len(v)",
            "x * (2 if v.dtype == np.float64 else 3)",
            "x * torch.tensor(v).to(x.device)",
            "x * sum(v.tolist())",
        ),
        advances=("v + 1", "v[::-1].copy()", "v[:1]"),
        mutations=("v += 1", "v[0] = 7", "v.fill(3)", "v.sort()", "v[:] = v[::-1].copy()"),
    ),
    _value(
        "set of strings",
        "container",
        "{'a'}",
        "{'b'}",
        "{'a', 'b'}",
        uses=(
            "x * (2 if 'a' in v else 3)",
            "x * len(v)",
            "x * (2 if v == {'a'} else 3)",
            "x * len(sorted(v)[0] * 2)",
        ),
        advances=("v ^ {'a', 'b'}", "v | {'b'}"),
        mutations=("v.add('b')", "v.discard('a')", "v ^= {'a', 'b'}", "v.clear()"),
    ),
)

# -- holders -----------------------------------------------------------------------------------------

ANY = frozenset[str]()


@dataclasses.dataclass(frozen=True)
class Holder:
    """Where a value is kept, and how code reads and writes it there."""

    name: str
    setup: str
    read: str
    write: str = ""  # statements with NEW; empty if `read` can be assigned to
    needs: frozenset[str] = ANY  # one of these traits, if there are any
    lacks: frozenset[str] = ANY  # none of these traits
    owner: str = ""
    attr: str = "value"
    has_dict: bool = False  # whether `vars(owner)` has the value
    container: str = ""
    key: str = "0"
    members: str = ""
    assigns: tuple[str, ...] = ()  # names that `write` or `replace` binds
    replace: str = ""  # a new holder, with NEW
    grow: tuple[str, ...] = ()  # statements that add NEW, or change the order of what there is
    remove: str = ""
    signature: str = ""  # a parameter of the step itself
    argument: str = ""  # what the step is called with
    look: str = ""  # how others than the step read it; empty if as `read` says
    action: str = ""  # what the step does with the holder in each call
    traces: str = ""  # where that can be seen

    def __repr__(self) -> str:
        return self.name

    @property
    def is_target(self) -> bool:
        """Whether `read` can be assigned to and deleted."""
        return not self.write

    def takes(self, value: Value) -> bool:
        return (not self.needs or bool(self.needs & value.traits)) and not (self.lacks & value.traits)


def _holder(
    name: str, setup: str, read: str = "", *, needs: str = "", lacks: str = "", **more: Any
) -> Holder:
    return Holder(
        name,
        textwrap.dedent(setup).strip(),
        read,
        needs=frozenset(needs.split()),
        lacks=frozenset(lacks.split()),
        **more,
    )


def _attribute(name: str, setup: str, owner: str = "held@", **more: Any) -> Holder:
    attr = more.get("attr", "value")
    return _holder(name, setup, f"{owner}.{attr}", owner=owner, **more)


def _item(name: str, setup: str, container: str = "held@", key: str = "0", **more: Any) -> Holder:
    return _holder(name, setup, f"{container}[{key}]", container=container, key=key, **more)


CLASS = "class Kind@:\n    pass\n"

HOLDERS = (
    _holder("variable", "held@ = INIT", "held@", assigns=("held@",)),
    _attribute(
        "attribute of an object",
        f"{CLASS}\nheld@ = Kind@()\nheld@.value = INIT",
        has_dict=True,
        assigns=("held@",),
        replace="held@ = Kind@()\nheld@.value = NEW",
    ),
    _item(
        "value of a dict",
        "held@ = {'a': INIT}",
        key="'a'",
        grow=(
            "held@['b'] = NEW",
            "held@.update(a=held@.pop('a'), b=NEW)",
        ),
        members="held@.values()",
        assigns=("held@",),
        replace="held@ = {'a': NEW}",
    ),
    _item(
        "element of a list",
        "held@ = [INIT]",
        grow=(
            "held@.append(NEW)",
            "held@.insert(0, NEW)",
            "held@.reverse()",
        ),
        members="held@",
        assigns=("held@",),
        replace="held@ = [NEW]",
    ),
    _holder(
        "default argument",
        "def given@(value=INIT):\n    return value",
        "given@()",
        write="given@.__defaults__ = (NEW,)",
        members="given@.__defaults__",
    ),
    _holder(
        "keyword-only default",
        "def given@(*, value=INIT):\n    return value",
        "given@()",
        write="given@.__kwdefaults__['value'] = NEW",
        members="given@.__kwdefaults__.values()",
        replace="given@.__kwdefaults__ = {'value': NEW}",
    ),
    _holder(
        "default argument of the step",
        "",
        "held@",
        signature="held@=INIT",
        write="step.__defaults__ = (NEW,)",
        look="step.__defaults__[-1]",
    ),
    _holder(
        "keyword-only default of the step",
        "",
        "held@",
        signature="*, held@=INIT",
        write="step.__kwdefaults__['held@'] = NEW",
        look="step.__kwdefaults__['held@']",
    ),
    _holder(
        "argument",
        "outer@ = INIT",
        "held@",
        signature="held@",
        argument="outer@",
        write="outer@ = NEW",
        assigns=("outer@",),
        look="outer@",
        lacks="cpu",  # a step moves such an argument, and so has a copy of it
    ),
    _attribute("slot", "class Kind@:\n    __slots__ = ('value',)\n\nheld@ = Kind@()\nheld@.value = INIT"),
    _attribute(
        "property",
        """
        class Kind@:
            def __init__(self, value):
                self._value = value

            @property
            def value(self):
                return self._value

        held@ = Kind@(INIT)
        """,
        write="held@._value = NEW",
        assigns=("held@",),
        replace="held@ = Kind@(NEW)",
    ),
    _attribute("class attribute", "class Kind@:\n    value = INIT", "Kind@", has_dict=True, lacks="callable"),
    _attribute(
        "inherited class attribute",
        "class Base@:\n    value = INIT\n\nclass Kind@(Base@):\n    pass\n\nheld@ = Kind@()",
        write="Base@.value = NEW",
        replace="Kind@.value = NEW",
        lacks="callable",
    ),
    _attribute(
        "attribute of a class shadowed by the object's",
        "class Kind@:\n    value = INIT\n\nheld@ = Kind@()",
        lacks="callable",
    ),
    _holder(
        "key of a dict",
        "held@ = {INIT: 1}",
        "[*held@][0]",
        write="replaced@ = NEW\nheld@.clear()\nheld@[replaced@] = 1",
        needs="hashable",
        grow=("held@[NEW] = 2",),
        members="held@",
        assigns=("held@",),
        replace="held@ = {NEW: 1}",
    ),
    _holder(
        "nested tuple",
        "held@ = (1, (INIT,))",
        "held@[1][0]",
        write="held@ = (1, (NEW,))",
        container="held@[1]",
        members="held@[1]",
        assigns=("held@",),
    ),
    _item(
        "nested list",
        "held@ = [1, [INIT]]",
        "held@[1]",
        grow=(
            "held@[1].append(NEW)",
            "held@[1].insert(0, NEW)",
        ),
        members="held@[1]",
        replace="held@[1] = [NEW]",
    ),
    _attribute(
        "field of a namedtuple",
        "Kind@ = collections.namedtuple('Kind@', 'value')\nheld@ = Kind@(INIT)",
        write="held@ = held@._replace(value=NEW)",
        container="held@",
        members="held@",
        assigns=("held@",),
        replace="held@ = Kind@(NEW)",
    ),
    *(
        _attribute(
            f"field of a dataclass{title}",
            f"@dataclasses.dataclass({options})\nclass Kind@:\n    value: object\n\nheld@ = Kind@(INIT)",
            has_dict="slots" not in options,
            write=write,
            assigns=("held@",),
            replace="held@ = Kind@(NEW)",
        )
        for title, options, write in (
            ("", "", ""),
            (" with slots", "slots=True", ""),
            (", frozen", "frozen=True", "held@ = dataclasses.replace(held@, value=NEW)"),
        )
    ),
    _holder(
        "value of an enum member",
        "class Kind@(enum.Enum):\n    A = INIT\n    B = 0",
        "Kind@.A.value",
        write="Kind@.A._value_ = NEW",
        needs="number text",
        owner="Kind@.A",
    ),
    _holder(
        "element of a set",
        "held@ = {INIT}",
        "[*held@][0]",
        write="replaced@ = NEW\nheld@.clear()\nheld@.add(replaced@)",
        needs="hashable",
        members="held@",
        assigns=("held@",),
        replace="held@ = {NEW}",
    ),
    _holder(
        "element of a frozenset",
        "held@ = frozenset([INIT])",
        "[*held@][0]",
        write="held@ = frozenset([NEW])",
        needs="hashable",
        members="held@",
        assigns=("held@",),
    ),
    _item(
        "element of a deque",
        "held@ = collections.deque([INIT], maxlen=2)",
        grow=(
            "held@.append(NEW)",
            "held@.rotate()",
        ),
        members="held@",
        assigns=("held@",),
        replace="held@.appendleft(NEW)",
    ),
    _item(
        "array.array",
        "held@ = array.array('d', [INIT])",
        needs="numeric",
        grow=(
            "held@.append(NEW)",
            "held@.insert(0, NEW)",
        ),
        members="held@",
        assigns=("held@",),
        replace="held@ = array.array('d', [NEW])",
    ),
    _item("bytearray", "held@ = bytearray([INIT])", needs="byte", members="held@"),
    _item(
        "memoryview",
        "buffer@ = bytearray([INIT])\nheld@ = memoryview(buffer@)",
        needs="byte",
        members="held@",
        replace="buffer@[0] = NEW",
    ),
    _holder(
        "NumPy array",
        "held@ = np.array([INIT])",
        "held@[0].item()",
        write="held@[0] = NEW",
        needs="numeric",
        members="held@.tolist()",
        assigns=("held@",),
        replace="held@ = np.array([NEW])",
    ),
    _holder(
        "view of a NumPy array",
        "base@ = np.array([INIT, 0])\nheld@ = base@[:1]",
        "held@[0].item()",
        write="base@[0] = NEW",
        needs="numeric",
        members="held@.tolist()",
    ),
    _holder(
        "NumPy array of objects",
        "held@ = np.array([None], dtype=object)\nheld@[0] = INIT",
        "held@[0]",
        write="held@[0] = NEW",
        lacks="container tensor array",
        container="held@",
    ),
    _holder(
        "argument of a partial",
        "held@ = functools.partial(taken, INIT)",
        "held@()",
        write="held@ = functools.partial(taken, NEW)",
        members="held@.args",
        assigns=("held@",),
    ),
    _holder(
        "keyword of a partial",
        "held@ = functools.partial(taken, value=INIT)",
        "held@()",
        write="held@.keywords['value'] = NEW",
        grow=("held@.keywords['value2'] = NEW",),
        members="held@.keywords.values()",
        assigns=("held@",),
        replace="held@ = functools.partial(taken, value=NEW)",
    ),
    _attribute(
        "types.SimpleNamespace",
        "held@ = types.SimpleNamespace(value=INIT)",
        has_dict=True,
        assigns=("held@",),
        replace="held@ = types.SimpleNamespace(value=NEW)",
    ),
    _attribute(
        "attribute of a Python module",
        "held@ = types.ModuleType('held@')\nheld@.value = INIT",
        has_dict=True,
    ),
    _attribute(
        "attribute of a module of torch",
        "class Kind@(nn.Module):\n    pass\n\nheld@ = Kind@()\nheld@.value = INIT",
        assigns=("held@",),
        replace="held@ = Kind@()\nheld@.value = NEW",
    ),
    _attribute(
        "buffer",
        "held@ = nn.Module()\nheld@.register_buffer('value', INIT)",
        needs="tensor",
        lacks="parameter",
        replace="held@._buffers['value'] = NEW",
    ),
    _attribute(
        "parameter of a module",
        "held@ = nn.Module()\nheld@.register_parameter('value', INIT)",
        needs="parameter",
        replace="held@._parameters['value'] = NEW",
    ),
    _item("nn.ParameterList", "held@ = nn.ParameterList([INIT])", needs="parameter", members="held@"),
    _item("nn.ModuleList", "held@ = nn.ModuleList([INIT])", needs="module", members="held@"),
    _item("nn.Sequential", "held@ = nn.Sequential(INIT)", needs="module", members="held@"),
    _item(
        "nn.ParameterDict",
        "held@ = nn.ParameterDict({'a': INIT})",
        key="'a'",
        needs="parameter",
        members="held@.values()",
    ),
    _item("nn.ModuleDict", "held@ = nn.ModuleDict({'a': INIT})", key="'a'", needs="module"),
    _item(
        "value in an optimizer's group",
        "held@ = torch.optim.SGD([torch.ones(3).to(DEVICE)], lr=0.5)\nheld@.param_groups[0]['value'] = INIT",
        "held@.param_groups[0]",
        "'value'",
        replace="held@.param_groups[0] = {**held@.param_groups[0], 'value': NEW}",
    ),
    _item(
        "learning rate",
        "held@ = torch.optim.SGD([torch.ones(3).to(DEVICE)], lr=INIT)",
        "held@.param_groups[0]",
        "'lr'",
        needs="float",
    ),
    *(
        _item(
            f"{title} of an optimizer that steps",
            f"weight@ = torch.ones(3).to(DEVICE)\nheld@ = torch.optim.{optimizer}\n"
            f"held@.param_groups[0][{key}] = INIT",
            "held@.param_groups[0]",
            key,
            needs="float",
            action="weight@.grad = x * weight@\nheld@.step()",
            traces="[weight@, [*held@.state[weight@].values()]]",
        )
        for title, key, optimizer in (
            ("learning rate", "'lr'", "SGD([weight@], lr=0.5, momentum=0.5)"),
            ("weight decay", "'weight_decay'", "AdamW([weight@], lr=0.5)"),
        )
    ),
    _item(
        "value in an optimizer's state",
        """
        weight@ = torch.ones(3).to(DEVICE)
        held@ = torch.optim.SGD([weight@], lr=0.5)
        held@.state[weight@]['value'] = INIT
        """,
        "held@.state[weight@]",
        "'value'",
        replace="held@.state[weight@] = {'value': NEW}",
    ),
    _holder(
        "variable of an inner function",
        """
        def make@(value):
            def get():
                return value

            def put(new):
                nonlocal value
                value = new

            return get, put

        get@, put@ = make@(INIT)
        """,
        "get@()",
        write="put@(NEW)",
        assigns=("get@", "put@"),
        replace="get@, put@ = make@(NEW)",
    ),
    _holder(
        "default argument of a lambda",
        "held@ = lambda value=INIT: value",
        "held@()",
        write="held@.__defaults__ = (NEW,)",
        assigns=("held@",),
        replace="held@ = lambda value=NEW: value",
    ),
    _holder(
        "variable of a generator",
        """
        def produce@(value):
            while True:
                new = yield value
                value = value if new is None else new[0]

        held@ = produce@(INIT)
        next(held@)
        """,
        "next(held@)",
        write="held@.send((NEW,))",
    ),
    _holder(
        "itertools.cycle",
        "held@ = itertools.cycle([INIT])",
        "next(held@)",
        write="held@ = itertools.cycle([NEW])",
        assigns=("held@",),
    ),
    _holder(
        "cell of a function",
        "def make@(value):\n    return lambda: value\n\nheld@ = make@(INIT)",
        "held@()",
        write="held@.__closure__[0].cell_contents = NEW",
    ),
    _holder(
        "contextvars.ContextVar",
        "held@ = contextvars.ContextVar('held@')\nheld@.set(INIT)",
        "held@.get()",
        write="held@.set(NEW)",
    ),
    _attribute(
        "threading.local",
        "held@ = threading.local()\nheld@.value = INIT",
        has_dict=True,
        remove="del held@.value",
    ),
    _attribute(
        "target of a weak reference",
        f"{CLASS}\ntarget@ = Kind@()\ntarget@.value = INIT\nheld@ = weakref.ref(target@)",
        "held@()",
        has_dict=True,
        assigns=("target@", "held@"),
        replace="target@ = Kind@()\ntarget@.value = NEW\nheld@ = weakref.ref(target@)",
    ),
    _item(
        "value of a WeakKeyDictionary",
        f"{CLASS}\nkey@ = Kind@()\nheld@ = weakref.WeakKeyDictionary()\nheld@[key@] = INIT",
        key="key@",
        members="held@.values()",
        assigns=("key@",),
        replace="key@ = Kind@()\nheld@[key@] = NEW",
    ),
    _attribute(
        "attribute of a function",
        "def held@():\n    pass\n\nheld@.value = INIT",
        has_dict=True,
    ),
    _attribute(
        "attribute of a tensor", "held@ = torch.ones(3).to(DEVICE)\nheld@.value = INIT", has_dict=True
    ),
    _attribute(
        "attribute of a parameter",
        "held@ = nn.Parameter(torch.ones(3).to(DEVICE))\nheld@.value = INIT",
        has_dict=True,
    ),
    _attribute(
        "behind __getattr__",
        """
        class Kind@:
            def __init__(self, value):
                self.__dict__['_values'] = {'value': value}

            def __getattr__(self, name):
                try:
                    return self._values[name]
                except KeyError as error:
                    raise AttributeError(name) from error

        held@ = Kind@(INIT)
        """,
        write="held@._values['value'] = NEW",
        replace="held@.__dict__['_values'] = {'value': NEW}",
        remove="del held@._values['value']",
    ),
    _item(
        "behind __getitem__",
        """
        class Kind@:
            def __init__(self, value):
                self._values = (value,)

            def __getitem__(self, key):
                return self._values[key]

        held@ = Kind@(INIT)
        """,
        write="held@._values = (NEW,)",
        members="held@",
        assigns=("held@",),
        replace="held@ = Kind@(NEW)",
    ),
    _holder(
        "behind __iter__ and __len__",
        """
        class Kind@:
            def __init__(self, value):
                self._value = value

            def __iter__(self):
                yield self._value

            def __len__(self):
                return 1

        held@ = Kind@(INIT)
        """,
        "[*held@][0]",
        write="held@._value = NEW",
        members="held@",
    ),
    _holder(
        "behind __call__",
        """
        class Kind@:
            def __call__(self):
                return self._value

        held@ = Kind@()
        held@._value = INIT
        """,
        "held@()",
        write="held@._value = NEW",
    ),
    _attribute(
        "behind a descriptor",
        """
        class Stored@:
            def __get__(self, owner, kind=None):
                return owner.__dict__['_value']

            def __set__(self, owner, value):
                owner.__dict__['_value'] = value

        class Kind@:
            value = Stored@()

        held@ = Kind@()
        held@.value = INIT
        """,
        remove="del held@._value",
    ),
    _attribute(
        "state of a descriptor",
        """
        class Stored@:
            def __get__(self, owner, kind=None):
                return self._value

        class Kind@:
            value = Stored@()

        held@ = Kind@()
        Kind@.__dict__['value']._value = INIT
        """,
        write="Kind@.__dict__['value']._value = NEW",
    ),
    _attribute(
        "attribute of a metaclass",
        "class Meta@(type):\n    value = INIT\n\nclass Kind@(metaclass=Meta@):\n    pass",
        "Kind@",
        write="Meta@.value = NEW",
        lacks="callable",
    ),
    _attribute(
        "cached property",
        """
        class Kind@:
            _value = None

            @functools.cached_property
            def value(self):
                return self._value[0]

        held@ = Kind@()
        held@._value = (INIT,)
        """,
        write="held@._value = (NEW,)\nvars(held@).pop('value', None)",
    ),
    _item(
        "collections.ChainMap",
        "base@ = {'a': INIT}\nheld@ = collections.ChainMap({}, base@)",
        key="'a'",
        write="base@['a'] = NEW",
        members="held@.values()",
        replace="held@['a'] = NEW",
    ),
    _item(
        "types.MappingProxyType",
        "base@ = {'a': INIT}\nheld@ = types.MappingProxyType(base@)",
        key="'a'",
        write="base@['a'] = NEW",
        members="held@.values()",
    ),
    _item(
        "collections.defaultdict",
        "held@ = collections.defaultdict(lambda: INIT)",
        key="'a'",
        grow=(
            "held@['b'] = NEW",
            "held@['b']",
        ),
        members="held@.values()",
    ),
    _item(
        "collections.UserDict",
        "held@ = collections.UserDict(a=INIT)",
        key="'a'",
        grow=("held@['b'] = NEW",),
        members="held@.values()",
        replace="held@.data = {'a': NEW}",
    ),
    _item(
        "subclass of dict",
        """
        class Kind@(dict):
            def __missing__(self, key):
                return self['other']

        held@ = Kind@(other=INIT)
        """,
        key="'a'",
        write="held@['other'] = NEW",
        replace="held@['a'] = NEW",
        remove="held@.pop('a', None)",
    ),
    _holder(
        "result of a method",
        """
        class Base@:
            def get(self):
                return self._value

        class Kind@(Base@):
            def get(self):
                return super().get()

        held@ = Kind@()
        held@._value = INIT
        """,
        "held@.get()",
        write="held@._value = NEW",
        assigns=("held@",),
        replace="held@ = Kind@()\nheld@._value = NEW",
    ),
    _holder(
        "attribute that a class method reads",
        "class Kind@:\n    @classmethod\n    def get(cls):\n        return cls._value\n\nKind@._value = INIT",
        "Kind@.get()",
        write="Kind@._value = NEW",
    ),
    _item("globals()", "globals()['held@'] = INIT", "globals()", "'held@'"),
    _attribute(
        "attribute of an imported module",
        "module@ = sys.modules['held_module@'] = types.ModuleType('held_module@')\nmodule@.value = INIT",
        "__import__('held_module@')",
        has_dict=True,
    ),
    _item(
        "os.environ",
        "os.environ['LAZYSTEP_TEST_VALUE@'] = INIT",
        "os.environ",
        "'LAZYSTEP_TEST_VALUE@'",
        needs="text",
    ),
)

# -- ways --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reach:
    """How code gets from the holder to the value."""

    name: str
    read: str
    setup: str = ""
    after: str = ""  # follows every change of the holder

    def __repr__(self) -> str:
        return self.name

    def fits(self, holder: Holder) -> bool:
        text = self.setup + self.read
        return (
            (not re.search(r"\bOWNER\b", text) or bool(holder.owner))
            and (not re.search(r"\bvars\b|__dict__", text) or holder.has_dict)
            and (not re.search(r"\bCONTAINER\b", text) or bool(holder.container))
            and (not re.search(r"\bMEMBERS\b", text) or bool(holder.members))
            and not (self.setup and holder.signature)
        )


def _function(name: str, body: str, decorator: str = "", after: str = "") -> Reach:
    setup = f"{decorator}def fetch@():\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}"
    return Reach(name, "fetch@()", setup, after)


def _reader(name: str, read: str, parameters: str = "self", decorator: str = "") -> Reach:
    method = f"{decorator}def fetch({parameters}):\n    return READ"
    return Reach(name, read, f"class Reader@:\n{textwrap.indent(method, '    ')}\n\nreader@ = Reader@()")


REACHES = (
    Reach("by its name", "READ"),
    _function("by a helper", "return READ"),
    _reader("by a method", "reader@.fetch()"),
    _reader("by a property", "reader@.fetch", decorator="@property\n"),
    _reader("by a static method", "Reader@.fetch()", "", "@staticmethod\n"),
    Reach("by a lambda", "fetch@()", "fetch@ = lambda: READ"),
    Reach("getattr", "getattr(OWNER, 'ATTR')"),
    Reach("getattr with a default", "getattr(OWNER, 'ATTR', 4.0)"),
    Reach("hasattr", "(OWNER.ATTR if hasattr(OWNER, 'ATTR') else 4.0)"),
    Reach("getattr with a computed name", "getattr(OWNER, '_ATTR'[1:])"),
    Reach("vars", "vars(OWNER)['ATTR']"),
    Reach("__dict__", "OWNER.__dict__['_ATTR'[1:]]"),
    Reach("values of vars", "[one for name, one in vars(OWNER).items() if name == 'ATTR'][0]"),
    Reach("attrgetter", "operator.attrgetter('ATTR')(OWNER)"),
    Reach("attrgetter made outside", "getter@(OWNER)", "getter@ = operator.attrgetter('ATTR')"),
    Reach("itemgetter", "operator.itemgetter(KEY)(CONTAINER)"),
    Reach("methodcaller", "operator.methodcaller('__getitem__', KEY)(CONTAINER)"),
    Reach("bound method made outside", "getter@(KEY)", "getter@ = CONTAINER.__getitem__"),
    Reach("first of a comprehension", "[one for one in MEMBERS][0]"),
    Reach("last of many", "[*MEMBERS][-1]"),
    Reach("last of a dict of many", "{number: one for number, one in enumerate(MEMBERS)}.popitem()[1]"),
    Reach("next of an iterator", "next(iter(MEMBERS))"),
    Reach("sorted", "sorted(MEMBERS, key=lambda one: 0)[0]"),
    Reach("zip", "[one for one, _ in zip(MEMBERS, (1,))][0]"),
    Reach("map", "[*map(lambda one: one, MEMBERS)][0]"),
    Reach("enumerate", "dict(enumerate(MEMBERS))[0]"),
    Reach("arguments", "(lambda first, *rest: first)(*MEMBERS)"),
    Reach("reduce", "functools.reduce(lambda one, two: one, MEMBERS)"),
    Reach("chain", "[*itertools.chain(MEMBERS)][0]"),
    _function("for", "for one in MEMBERS:\n    return one"),
    _function("unpacked", "first, *rest = MEMBERS\nreturn first"),
    _function("match of a class", "match OWNER:\n    case object(ATTR=one):\n        return one"),
    _function("match of a mapping", "match dict(a=READ):\n    case {'a': one}:\n        return one"),
    _function("match of a sequence", "match [*MEMBERS]:\n    case [one, *_]:\n        return one"),
    Reach("in a comprehension", "[READ for _ in range(1)][0]"),
    Reach("in a generator", "next(READ for _ in range(1))"),
    Reach("in a dict", "{'a': READ}['a']"),
    _function("by lru_cache, cleared", "return READ", "@functools.lru_cache(None)\n", "fetch@.cache_clear()"),
    _function("by lru_cache, never cleared", "return READ", "@functools.lru_cache(None)\n"),
    Reach("copy of the owner", "copy.copy(OWNER).ATTR"),
    Reach("copy of the container", "copy.copy(CONTAINER)[KEY]"),
    Reach("copy", "copy.copy(READ)"),
    Reach("deepcopy", "copy.deepcopy(READ)"),
    Reach("in a container that is copied", "copy.deepcopy([READ])[0]"),
    _function(
        "try", "try:\n    return READ\nexcept (LookupError, AttributeError, NameError):\n    return 4.0"
    ),
    Reach("partial", "functools.partial(getattr, OWNER)('ATTR')"),
    Reach("object.__getattribute__", "object.__getattribute__(OWNER, 'ATTR')"),
)


@dataclasses.dataclass(frozen=True)
class Frame:
    """Where in the step the value is used: `use(x)` reads and uses it. The first frame does so itself."""

    name: str
    body: str  # statements that compute `y`
    setup: str = ""

    def __repr__(self) -> str:
        return self.name


def _frame(name: str, body: str, setup: str = "") -> Frame:
    return Frame(name, textwrap.dedent(body).strip(), textwrap.dedent(setup).strip())


FUNCTION = """
class Used(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return {}

    @staticmethod
    def backward(ctx, grad):
        return {}
"""
GRADIENT = "leaf = x.detach().clone().requires_grad_()\n{}.sum().backward()\ny = leaf.grad"
LAYER = "identity = nn.Identity()\nidentity.{}"

FRAMES = (
    _frame("in the step", ""),
    _frame("in a function", "y = use(x)"),
    _frame(
        "in a method",
        "y = model.run(x)",
        """
        class Model:
            def run(self, x):
                return use(x)

        model = Model()
        """,
    ),
    _frame(
        "in a module's forward",
        "y = model(x)",
        """
        class Model(nn.Module):
            def forward(self, x):
                return use(x)

        model = Model()
        """,
    ),
    _frame(
        "in a forward hook",
        "y = identity(x)",
        LAYER.format("register_forward_hook(lambda module, inputs, output: use(output))"),
    ),
    _frame(
        "in a forward pre-hook",
        "y = identity(x)",
        LAYER.format("register_forward_pre_hook(lambda module, inputs: use(inputs[0]))"),
    ),
    _frame(
        "in a tensor's hook",
        """
        leaf = x.detach().clone().requires_grad_()
        leaf.register_hook(use)
        (leaf * x).sum().backward()
        y = leaf.grad
        """,
    ),
    _frame(
        "in a backward hook",
        GRADIENT.format("identity(leaf * 2)"),
        LAYER.format("register_full_backward_hook(lambda module, inputs, outputs: (use(outputs[0]),))"),
    ),
    _frame(
        "in the forward of an autograd function", "y = Used.apply(x)", FUNCTION.format("use(x)", "grad * 2")
    ),
    _frame(
        "in the backward of an autograd function",
        GRADIENT.format("Used.apply(leaf)"),
        FUNCTION.format("x * 2", "use(grad)"),
    ),
    _frame(
        "in a checkpoint",
        GRADIENT.format("torch.utils.checkpoint.checkpoint(use, leaf, use_reentrant=False)"),
    ),
    _frame("under no_grad", "with torch.no_grad():\n    y = use(x)"),
    _frame("in a map", "y = [*map(use, [x])][0]"),
    _frame("in a comprehension", "y = [use(one) for one in (x,)][0]"),
    _frame("in a generator", "y = next(use(one) for one in (x,))"),
    _frame("in an inner function", "def inner():\n    return use(x)\n\ny = inner()"),
    _frame("in a partial", "y = functools.partial(use, x)()"),
    _frame("in an exception handler", "try:\n    raise KeyError\nexcept KeyError:\n    y = use(x)"),
    _frame("in a function that is called twice", "y = use(use(x))"),
    _frame(
        "in a training step",
        """
        loss = (use(x).float().sum() * net(x).sum()).square()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        y = loss
        """,
        "net = layer(0.5)\noptimizer = torch.optim.Adam(net.parameters(), lr=0.1)",
    ),
)

# -- around every step -----------------------------------------------------------------------------

PRELUDE = """
import array, collections, contextvars, copy, dataclasses, enum, functools, itertools, math, operator, os, sys
import threading, types, weakref
import numpy as np, torch, torch.utils.checkpoint
from torch import nn

DEVICE = "{device}"


class Scale:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale

    def __len__(self):
        return int(self.scale)


@dataclasses.dataclass(slots=True, eq=False)
class Slots(Scale):
    scale: object


class Mode(enum.Enum):
    A = 2
    B = 3


def taken(value):
    return value


def scaled(x, a, b=1):
    return x * a * b


def matched(value):
    match value:
        case 2 | "sin" | [2.0, *_] | {{"a": 2.0}} | Mode.A:
            return 1.5
        case None | int() | "cos" | [_, _] | {{"b": _}}:
            return 2.5
        case _:
            return 3.5


def layer(weight):
    made = nn.Linear(3, 3, bias=False)
    nn.init.constant_(made.weight, weight)
    return made.to(DEVICE)


def norm():
    return nn.BatchNorm1d(3).to(DEVICE)
""".strip()
