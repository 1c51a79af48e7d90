"""The native front end: ops caught in C++, recorded without Python where nothing is new.

`_recorder` is the extension (src/), `front_end` its Python side. An install without a compiler has no
extension, and one that was built for another torch can't be used: then the Python front end is.
"""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from ...errors import LazyStepError
from ...extensions import RECORDER, ExtensionError
from ...notices import LazyStepWarning

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
    try:
        RECORDER.load()
    except ExtensionError as error:
        if choice == "native":
            raise LazyStepError(f"LAZYSTEP_RECORDER=native: {error}. {_REMEDY}") from None
        if not error.is_missing:
            message = f"{error}; the Python one is used, which is slower. {_REMEDY}"
            warnings.warn(message, LazyStepWarning, stacklevel=2)
        return None
    return importlib.import_module(".front_end", __package__)
