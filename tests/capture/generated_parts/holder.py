"""A holder: where a value is kept. The rows are in containers.py and code_and_classes.py."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from .values import Value

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


def holder_of(
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


def attribute(name: str, setup: str, owner: str = "held@", **more: Any) -> Holder:
    attr = more.get("attr", "value")
    return holder_of(name, setup, f"{owner}.{attr}", owner=owner, **more)


def item(name: str, setup: str, container: str = "held@", key: str = "0", **more: Any) -> Holder:
    return holder_of(name, setup, f"{container}[{key}]", container=container, key=key, **more)


CLASS = "class Kind@:\n    pass\n"
