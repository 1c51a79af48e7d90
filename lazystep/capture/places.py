"""Places: the slots of containers, objects and closures in which a step finds its state."""

from __future__ import annotations

from typing import Any, NamedTuple


class Place(NamedTuple):
    """A slot: `container[key]`, a closure's cell, an attribute, a gradient, or an element of a tuple.

    The container of an element is the place of its tuple: setting the element replaces the tuple. The
    container of a gradient is a parameter, or the place of a tensor that may be replaced.
    """

    container: Any
    key: Any
    kind: str  # "item", "cell", "attribute", "class", "context", "grad" or "element"

    def get(self) -> Any:
        """The value in the slot now; None if the slot no longer exists."""
        if self.kind == "item":
            try:
                return self.container[self.key]
            except (KeyError, IndexError):
                return None
        if self.kind == "grad":
            return getattr(self._tensor(), "grad", None)
        if self.kind == "attribute":
            return getattr(self.container, self.key, None)
        if self.kind == "class":  # not `getattr`, which would search base classes and bind methods
            return self.container.__dict__.get(self.key)
        if self.kind == "context":
            return self.container.get(None)
        if self.kind == "element":
            elements = self.container.get()
            is_there = isinstance(elements, tuple) and self.key < len(elements)
            return elements[self.key] if is_there else None
        try:
            return self.container.cell_contents
        except ValueError:
            return None

    def set(self, value: Any) -> None:
        """Put a value into the slot."""
        if self.kind == "item":
            self.container[self.key] = value
        elif self.kind == "grad":
            self._tensor().grad = value
        elif self.kind in ("attribute", "class"):
            setattr(self.container, self.key, value)
        elif self.kind == "context":
            self.container.set(value)
        elif self.kind == "element":
            old = self.container.get()
            elements = [*old[: self.key], value, *old[self.key + 1 :]]
            is_named = hasattr(old, "_fields")
            self.container.set(type(old)(*elements) if is_named else type(old)(elements))
        else:
            self.container.cell_contents = value

    def _tensor(self) -> Any:
        return self.container.get() if isinstance(self.container, Place) else self.container

    @property
    def identity(self) -> tuple[Any, ...]:
        """A key for this slot: equal for the same slot of the same container. Hashable."""
        is_nested = isinstance(self.container, Place)
        return self.container.identity if is_nested else id(self.container), self.key, self.kind

    @property
    def name(self) -> str:
        """The slot's name in messages."""
        return name_of(self.key)


def name_of(key: Any) -> str:
    """The name, in messages, of a slot with this key."""
    return "a variable" if key is None else repr(key)
