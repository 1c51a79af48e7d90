"""Reading many places at once and comparing what is there: the extension that is built from src/places.c."""

from typing import Any

# How to read, what to check, whether the value is an output; the row whose value is the container, or -1; the
# container if there is no such row; the key; what is expected. See `Get` and `Check` in guards.py.
_Row = tuple[int, int, bool, int, Any, Any, Any]

class Plan:
    """Rows, each of which reads one place and checks what it finds.

    A row reads from a fixed object or from the value of an earlier row.
    """

    def __init__(self, rows: list[_Row], /) -> None:
        """Raises `ValueError` if a row refers to a later one."""

    num_looked_at: int  # rows and dicts that the last read has looked at

    def read(self) -> list[Any] | int:
        """The values of the output rows, or the number of the first row that does not fit.

        The list is not to be changed: it is returned again as long as nothing has changed.

        Runs no Python code, but for comparisons of values that are not the same object.
        """

def dict_of_class(kind: type, /) -> dict[str, Any]:
    """The dict of a class itself, which `__dict__` only shows."""

def is_same(a: Any, b: Any, /) -> bool:
    """Whether two values are the same to any code that computes with them.

    Floats are compared by their bits: 0.0 is not -0.0, and a NaN is itself. So are types: 1 is not True.
    """

def to_float32(number: float, /) -> float:
    """The nearest number that has 32 bits, as a float. Infinite if the number is too large."""
