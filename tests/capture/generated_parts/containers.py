"""Holders that are variables, objects, containers, modules and optimizers."""

from __future__ import annotations

from .holder import CLASS, attribute, holder_of, item

CONTAINERS = (
    holder_of("variable", "held@ = INIT", "held@", assigns=("held@",)),
    attribute(
        "attribute of an object",
        f"{CLASS}\nheld@ = Kind@()\nheld@.value = INIT",
        has_dict=True,
        assigns=("held@",),
        replace="held@ = Kind@()\nheld@.value = NEW",
    ),
    item(
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
    item(
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
    holder_of(
        "default argument",
        "def given@(value=INIT):\n    return value",
        "given@()",
        write="given@.__defaults__ = (NEW,)",
        members="given@.__defaults__",
    ),
    holder_of(
        "keyword-only default",
        "def given@(*, value=INIT):\n    return value",
        "given@()",
        write="given@.__kwdefaults__['value'] = NEW",
        members="given@.__kwdefaults__.values()",
        replace="given@.__kwdefaults__ = {'value': NEW}",
    ),
    holder_of(
        "default argument of the step",
        "",
        "held@",
        signature="held@=INIT",
        write="step.__defaults__ = (NEW,)",
        look="step.__defaults__[-1]",
    ),
    holder_of(
        "keyword-only default of the step",
        "",
        "held@",
        signature="*, held@=INIT",
        write="step.__kwdefaults__['held@'] = NEW",
        look="step.__kwdefaults__['held@']",
    ),
    holder_of(
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
    attribute("slot", "class Kind@:\n    __slots__ = ('value',)\n\nheld@ = Kind@()\nheld@.value = INIT"),
    attribute(
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
    attribute("class attribute", "class Kind@:\n    value = INIT", "Kind@", has_dict=True, lacks="callable"),
    attribute(
        "inherited class attribute",
        "class Base@:\n    value = INIT\n\nclass Kind@(Base@):\n    pass\n\nheld@ = Kind@()",
        write="Base@.value = NEW",
        replace="Kind@.value = NEW",
        lacks="callable",
    ),
    attribute(
        "attribute of a class shadowed by the object's",
        "class Kind@:\n    value = INIT\n\nheld@ = Kind@()",
        lacks="callable",
    ),
    holder_of(
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
    holder_of(
        "nested tuple",
        "held@ = (1, (INIT,))",
        "held@[1][0]",
        write="held@ = (1, (NEW,))",
        container="held@[1]",
        members="held@[1]",
        assigns=("held@",),
    ),
    item(
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
    attribute(
        "field of a namedtuple",
        "Kind@ = collections.namedtuple('Kind@', 'value')\nheld@ = Kind@(INIT)",
        write="held@ = held@._replace(value=NEW)",
        container="held@",
        members="held@",
        assigns=("held@",),
        replace="held@ = Kind@(NEW)",
    ),
    *(
        attribute(
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
    holder_of(
        "value of an enum member",
        "class Kind@(enum.Enum):\n    A = INIT\n    B = 0",
        "Kind@.A.value",
        write="Kind@.A._value_ = NEW",
        needs="number text",
        owner="Kind@.A",
    ),
    holder_of(
        "element of a set",
        "held@ = {INIT}",
        "[*held@][0]",
        write="replaced@ = NEW\nheld@.clear()\nheld@.add(replaced@)",
        needs="hashable",
        members="held@",
        assigns=("held@",),
        replace="held@ = {NEW}",
    ),
    holder_of(
        "element of a frozenset",
        "held@ = frozenset([INIT])",
        "[*held@][0]",
        write="held@ = frozenset([NEW])",
        needs="hashable",
        members="held@",
        assigns=("held@",),
    ),
    item(
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
    item(
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
    item("bytearray", "held@ = bytearray([INIT])", needs="byte", members="held@"),
    item(
        "memoryview",
        "buffer@ = bytearray([INIT])\nheld@ = memoryview(buffer@)",
        needs="byte",
        members="held@",
        replace="buffer@[0] = NEW",
    ),
    holder_of(
        "NumPy array",
        "held@ = np.array([INIT])",
        "held@[0].item()",
        write="held@[0] = NEW",
        needs="numeric",
        members="held@.tolist()",
        assigns=("held@",),
        replace="held@ = np.array([NEW])",
    ),
    holder_of(
        "view of a NumPy array",
        "base@ = np.array([INIT, 0])\nheld@ = base@[:1]",
        "held@[0].item()",
        write="base@[0] = NEW",
        needs="numeric",
        members="held@.tolist()",
    ),
    holder_of(
        "NumPy array of objects",
        "held@ = np.array([None], dtype=object)\nheld@[0] = INIT",
        "held@[0]",
        write="held@[0] = NEW",
        lacks="container tensor array",
        container="held@",
    ),
    holder_of(
        "argument of a partial",
        "held@ = functools.partial(taken, INIT)",
        "held@()",
        write="held@ = functools.partial(taken, NEW)",
        members="held@.args",
        assigns=("held@",),
    ),
    holder_of(
        "keyword of a partial",
        "held@ = functools.partial(taken, value=INIT)",
        "held@()",
        write="held@.keywords['value'] = NEW",
        grow=("held@.keywords['value2'] = NEW",),
        members="held@.keywords.values()",
        assigns=("held@",),
        replace="held@ = functools.partial(taken, value=NEW)",
    ),
    attribute(
        "types.SimpleNamespace",
        "held@ = types.SimpleNamespace(value=INIT)",
        has_dict=True,
        assigns=("held@",),
        replace="held@ = types.SimpleNamespace(value=NEW)",
    ),
    attribute(
        "attribute of a Python module",
        "held@ = types.ModuleType('held@')\nheld@.value = INIT",
        has_dict=True,
    ),
    attribute(
        "attribute of a module of torch",
        "class Kind@(nn.Module):\n    pass\n\nheld@ = Kind@()\nheld@.value = INIT",
        assigns=("held@",),
        replace="held@ = Kind@()\nheld@.value = NEW",
    ),
    attribute(
        "buffer",
        "held@ = nn.Module()\nheld@.register_buffer('value', INIT)",
        needs="tensor",
        lacks="parameter",
        replace="held@._buffers['value'] = NEW",
    ),
    attribute(
        "parameter of a module",
        "held@ = nn.Module()\nheld@.register_parameter('value', INIT)",
        needs="parameter",
        replace="held@._parameters['value'] = NEW",
    ),
    item("nn.ParameterList", "held@ = nn.ParameterList([INIT])", needs="parameter", members="held@"),
    item("nn.ModuleList", "held@ = nn.ModuleList([INIT])", needs="module", members="held@"),
    item("nn.Sequential", "held@ = nn.Sequential(INIT)", needs="module", members="held@"),
    item(
        "nn.ParameterDict",
        "held@ = nn.ParameterDict({'a': INIT})",
        key="'a'",
        needs="parameter",
        members="held@.values()",
    ),
    item("nn.ModuleDict", "held@ = nn.ModuleDict({'a': INIT})", key="'a'", needs="module"),
    item(
        "value in an optimizer's group",
        "held@ = torch.optim.SGD([torch.ones(3).to(DEVICE)], lr=0.5)\nheld@.param_groups[0]['value'] = INIT",
        "held@.param_groups[0]",
        "'value'",
        replace="held@.param_groups[0] = {**held@.param_groups[0], 'value': NEW}",
    ),
    item(
        "learning rate",
        "held@ = torch.optim.SGD([torch.ones(3).to(DEVICE)], lr=INIT)",
        "held@.param_groups[0]",
        "'lr'",
        needs="float",
    ),
    *(
        item(
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
    item(
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
)
