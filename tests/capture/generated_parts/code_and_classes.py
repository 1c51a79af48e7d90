"""Holders that are code and its surroundings, or objects of the user's own classes that hide the value."""

from __future__ import annotations

from .holder import CLASS, attribute, holder_of, item

CODE_AND_CLASSES = (
    holder_of(
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
    holder_of(
        "default argument of a lambda",
        "held@ = lambda value=INIT: value",
        "held@()",
        write="held@.__defaults__ = (NEW,)",
        assigns=("held@",),
        replace="held@ = lambda value=NEW: value",
    ),
    holder_of(
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
    holder_of(
        "itertools.cycle",
        "held@ = itertools.cycle([INIT])",
        "next(held@)",
        write="held@ = itertools.cycle([NEW])",
        assigns=("held@",),
    ),
    holder_of(
        "cell of a function",
        "def make@(value):\n    return lambda: value\n\nheld@ = make@(INIT)",
        "held@()",
        write="held@.__closure__[0].cell_contents = NEW",
    ),
    holder_of(
        "contextvars.ContextVar",
        "held@ = contextvars.ContextVar('held@')\nheld@.set(INIT)",
        "held@.get()",
        write="held@.set(NEW)",
    ),
    attribute(
        "threading.local",
        "held@ = threading.local()\nheld@.value = INIT",
        has_dict=True,
        remove="del held@.value",
    ),
    attribute(
        "target of a weak reference",
        f"{CLASS}\ntarget@ = Kind@()\ntarget@.value = INIT\nheld@ = weakref.ref(target@)",
        "held@()",
        has_dict=True,
        assigns=("target@", "held@"),
        replace="target@ = Kind@()\ntarget@.value = NEW\nheld@ = weakref.ref(target@)",
    ),
    item(
        "value of a WeakKeyDictionary",
        f"{CLASS}\nkey@ = Kind@()\nheld@ = weakref.WeakKeyDictionary()\nheld@[key@] = INIT",
        key="key@",
        members="held@.values()",
        assigns=("key@",),
        replace="key@ = Kind@()\nheld@[key@] = NEW",
    ),
    attribute(
        "attribute of a function",
        "def held@():\n    pass\n\nheld@.value = INIT",
        has_dict=True,
    ),
    attribute("attribute of a tensor", "held@ = torch.ones(3).to(DEVICE)\nheld@.value = INIT", has_dict=True),
    attribute(
        "attribute of a parameter",
        "held@ = nn.Parameter(torch.ones(3).to(DEVICE))\nheld@.value = INIT",
        has_dict=True,
    ),
    attribute(
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
    item(
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
    holder_of(
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
    holder_of(
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
    attribute(
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
    attribute(
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
    attribute(
        "attribute of a metaclass",
        "class Meta@(type):\n    value = INIT\n\nclass Kind@(metaclass=Meta@):\n    pass",
        "Kind@",
        write="Meta@.value = NEW",
        lacks="callable",
    ),
    attribute(
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
    item(
        "collections.ChainMap",
        "base@ = {'a': INIT}\nheld@ = collections.ChainMap({}, base@)",
        key="'a'",
        write="base@['a'] = NEW",
        members="held@.values()",
        replace="held@['a'] = NEW",
    ),
    item(
        "types.MappingProxyType",
        "base@ = {'a': INIT}\nheld@ = types.MappingProxyType(base@)",
        key="'a'",
        write="base@['a'] = NEW",
        members="held@.values()",
    ),
    item(
        "collections.defaultdict",
        "held@ = collections.defaultdict(lambda: INIT)",
        key="'a'",
        grow=(
            "held@['b'] = NEW",
            "held@['b']",
        ),
        members="held@.values()",
    ),
    item(
        "collections.UserDict",
        "held@ = collections.UserDict(a=INIT)",
        key="'a'",
        grow=("held@['b'] = NEW",),
        members="held@.values()",
        replace="held@.data = {'a': NEW}",
    ),
    item(
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
    holder_of(
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
    holder_of(
        "attribute that a class method reads",
        "class Kind@:\n    @classmethod\n    def get(cls):\n        return cls._value\n\nKind@._value = INIT",
        "Kind@.get()",
        write="Kind@._value = NEW",
    ),
    item("globals()", "globals()['held@'] = INIT", "globals()", "'held@'"),
    attribute(
        "attribute of an imported module",
        "module@ = sys.modules['held_module@'] = types.ModuleType('held_module@')\nmodule@.value = INIT",
        "__import__('held_module@')",
        has_dict=True,
    ),
    item(
        "os.environ",
        "os.environ['LAZYSTEP_TEST_VALUE@'] = INIT",
        "os.environ",
        "'LAZYSTEP_TEST_VALUE@'",
        needs="text",
    ),
)
