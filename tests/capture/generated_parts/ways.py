"""Ways: how code gets from the holder to the value, and where in the step it does."""

from __future__ import annotations

import dataclasses
import re
import textwrap

from .holder import Holder


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
