"""The native front end: ops caught in C++, recorded without Python where nothing is new.

`_recorder` is the extension (src/), `front_end` its Python side. Both are optional: without a compiler, or
with another torch than the one they were built for, the Python front end is used.
"""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import torch

from ...errors import LazyStepError

_REMEDY = "Build it again: pip install --no-build-isolation --force-reinstall --no-deps lazystep"


def load(choice: str) -> ModuleType | None:
    """The front end for the setting `recorder`; None for the Python one.

    `native` raises where the extension is missing or does not fit; `auto` warns where it does not fit.
    """
    if choice == "python":
        return None
    problem = _find_problem()
    if problem is None:
        return importlib.import_module(".front_end", __package__)
    text, is_missing = problem
    if choice == "native":
        raise LazyStepError(f"LAZYSTEP_RECORDER=native: {text}. {_REMEDY}")
    if not is_missing:
        warnings.warn(f"{text}: the Python recorder is used. {_REMEDY}", RuntimeWarning, stacklevel=2)
    return None


def _find_problem() -> tuple[str, bool] | None:
    """Why the extension can't be used, and whether that is because there is none."""
    try:
        extension = importlib.import_module("._recorder", __package__)
    except ModuleNotFoundError:
        return "lazystep was installed without its native recorder", True
    except ImportError as error:
        return f"lazystep's native recorder can't be loaded by torch {torch.__version__} ({error})", False
    built, here = extension.torch_version, torch.__version__.partition("+")[0]
    if built != here:
        return f"lazystep's native recorder was built for torch {built}, this is torch {here}", False
    return None
