"""The parts of generated step functions, as tables of templates: see `generated.py`.

Values are in `values.py`, and what is computed from them in `uses.py`; holders in `containers.py` and
`code_and_classes.py`; ways to a value and frames around its use in `ways.py`. A table begins with its
simplest row, because hypothesis shrinks to the first. In templates:

    held@                 a name of the holder: the second holder of a case gets names of its own
    INIT, NEW             the first value, and the next one, as source
    READ                  the expression that reads the value from its holder
    OWNER.ATTR            where the value is an attribute
    CONTAINER[KEY]        where it is an item
    MEMBERS               an iterable with the value as its first member
    v, x, y               the value, the step's argument, the result
"""

from __future__ import annotations

from .code_and_classes import CODE_AND_CLASSES
from .containers import CONTAINERS
from .holder import Holder
from .prelude import PRELUDE
from .values import VALUES, Value
from .ways import FRAMES, REACHES, Frame, Reach

HOLDERS = (*CONTAINERS, *CODE_AND_CLASSES)

__all__ = ["FRAMES", "HOLDERS", "PRELUDE", "REACHES", "VALUES", "Frame", "Holder", "Reach", "Value"]
