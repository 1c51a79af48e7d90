"""The native front end: ops caught in C++, recorded without Python where nothing is new.

`_recorder` is the extension (src/), `front_end` its Python side. Both are optional, and used where
`LAZYSTEP_RECORDER=native` asks for them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from ...errors import LazyStepError

_REMEDY = "Build it again: pip install --no-build-isolation --force-reinstall --no-deps lazystep"


def load(choice: str) -> ModuleType | None:
    """The front end for the setting `recorder`; None for the Python one.

    `native` raises where the extension is missing or does not fit. `auto` is the Python one: only its
    handlers tell capture (`@lazystep.step`) of draws and of memory from the host.
    """
    if choice != "native":
        return None
    problem = find_problem()
    if problem:
        raise LazyStepError(f"LAZYSTEP_RECORDER=native: {problem}. {_REMEDY}")
    return importlib.import_module(".front_end", __package__)


def find_problem() -> str:
    """Why the extension can't be used; empty if it can."""
    try:
        extension = importlib.import_module("._recorder", __package__)
    except ModuleNotFoundError:
        return "lazystep was installed without its native recorder"
    except ImportError as error:
        return f"lazystep's native recorder can't be loaded by torch {torch.__version__} ({error})"
    built, here = extension.torch_version, torch.__version__.partition("+")[0]
    if built != here:
        return f"lazystep's native recorder was built for torch {built}, this is torch {here}"
    return ""
