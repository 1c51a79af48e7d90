"""The native front end: ops caught in C++, recorded without Python where nothing is new.

`_recorder` is the extension (src/), `front_end` its Python side. An install without a compiler has no
extension, and one that was built for another torch can't be used: then the Python front end is.
"""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import torch

from ...errors import LazyStepError
from ...notices import LazyStepWarning

_MISSING = "lazystep was installed without its native recorder"
# Against the torch that is here, which need not be the one that an isolated build would get.
_REMEDY = (
    "Build it again: pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps lazystep"
)


def load(choice: str) -> ModuleType | None:
    """The front end for the setting `recorder`; None for the Python one.

    `auto` is the native one where it was built for this torch. Where it was built for another, a warning
    names the remedy, and where it was not built nothing is said. `native` raises in both cases.
    """
    if choice == "python":
        return None
    problem = find_problem()
    if not problem:
        return importlib.import_module(".front_end", __package__)
    if choice == "native":
        raise LazyStepError(f"LAZYSTEP_RECORDER=native: {problem}. {_REMEDY}")
    if problem != _MISSING:
        message = f"{problem}; the Python one is used, which is slower. {_REMEDY}"
        warnings.warn(message, LazyStepWarning, stacklevel=2)
    return None


def find_problem() -> str:
    """Why the extension can't be used; empty if it can."""
    try:
        extension = importlib.import_module("._recorder", __package__)
    except ModuleNotFoundError:
        return _MISSING
    except ImportError as error:
        return f"lazystep's native recorder can't be loaded by torch {torch.__version__} ({error})"
    built, here = extension.torch_version, torch.__version__.partition("+")[0]
    if built != here:
        return f"lazystep's native recorder was built for torch {built}, this is torch {here}"
    return ""
