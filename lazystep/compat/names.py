"""The names that `compat` has, and what each does here.

Each module of `torch_lazy` and `torch_xla` makes a `Names`, and says for every public name of its original
which name of lazystep does the same, or what to use instead. `to_markdown` makes the tables of
docs/coming-from.md from that, and tests compare the names with those of the installed torch.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

from ..errors import UnsupportedError

T = TypeVar("T")

# The packages beside this module, and the packages that they stand for.
SYSTEMS = {"torch_lazy": "torch._lazy", "torch_xla": "torch_xla"}
_NOTHING = "\N{EN DASH}"
_ROOT = __name__.rpartition(".")[0]
# How scripts call the modules, in the tables and in messages.
_SHORT = {
    "torch_xla.core.xla_model": "xm",
    "torch_xla.debug.metrics": "met",
    "torch_xla.distributed.parallel_loader": "pl",
    "torch_xla.runtime": "xr",
}


class Name(NamedTuple):
    """A public name of another system.

    `here` is Markdown: what does the same, or what to use instead. Empty if there is no such thing.
    """

    module: str
    name: str
    here: str
    difference: str
    is_refused: bool

    @property
    def short(self) -> str:
        """The name as scripts write it, such as `xm.mark_step`."""
        module = _SHORT.get(self.module, self.module)
        return f"{module}.{self.name}"


_names: dict[tuple[str, str], Name] = {}


class Names:
    """The names of one module. `module` is `__name__` of the module in `compat`."""

    def __init__(self, module: str) -> None:
        package, _, rest = module.removeprefix(_ROOT + ".").partition(".")
        self.module = ".".join(filter(None, [SYSTEMS[package], rest]))

    def same(self, name: str, thing: T, here: str, difference: str = "") -> T:
        """A name that is an object of lazystep's or torch's. Returns the object."""
        self._add(name, here, difference, is_refused=False)
        return thing

    def does(self, here: str, difference: str = "") -> Callable[[T], T]:
        """Decorate a function or class that is made for this module."""

        def decorate(thing: T) -> T:
            self._add(thing.__name__, here, difference, is_refused=False)  # type: ignore[attr-defined]
            return thing

        return decorate

    def refused(self, name: str, use: str, difference: str = "") -> Callable[..., NoReturn]:
        """A name that means nothing here: it can be imported, and a call raises and says what to use."""
        known = self._add(name, use, difference, is_refused=True)

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            self.refuse(name, use)

        refuse.__name__ = refuse.__qualname__ = name
        refuse.__doc__ = f"Raises `UnsupportedError`: there is no {known.short} here. Use {use}."
        return refuse

    def refuse(self, what: str, use: str) -> NoReturn:
        """Raise the error for a name, or for an argument of it."""
        module = _SHORT.get(self.module, self.module)
        raise UnsupportedError(f"there is no {module}.{what} on the lazy device: use {use.replace('`', '')}")

    def _add(self, name: str, here: str, difference: str, is_refused: bool) -> Name:
        found = _names[self.module, name] = Name(self.module, name, here, difference, is_refused)
        return found


def all_names(system: str) -> list[Name]:
    """The names of a system, in the order of its modules and of the names in them. Imports the modules."""
    package = importlib.import_module(f"{_ROOT}.{system}")
    modules = sorted(found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."))
    wanted = [Names(package.__name__).module]
    for module in modules:
        importlib.import_module(module)
        wanted.append(Names(module).module)
    return [name for module in wanted for name in _names.values() if name.module == module]


def to_markdown(system: str) -> str:
    """The table of a system's names. Neighbours that do the same share a row."""
    rows = [f"| {SYSTEMS[system]} | here | difference |", "|---|---|---|"]
    for _, group in itertools.groupby(all_names(system), lambda n: (n.module, *n[2:])):
        names = list(group)
        prefix = SYSTEMS["torch_lazy"] + "."
        theirs = ", ".join(f"`{name.short.removeprefix(prefix)}`" for name in names)
        here = f"refused: use {names[0].here}" if names[0].is_refused else names[0].here
        rows.append(f"| {theirs} | {here or _NOTHING} | {names[0].difference} |")
    return "\n".join(rows)
