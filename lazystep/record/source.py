"""The user's line: the innermost frame that belongs neither to torch, lazystep nor the standard library."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType, FrameType

import torch

from ..program.program import Source

_PACKAGES = tuple(
    os.path.join(os.path.dirname(os.path.abspath(path)), "")
    for path in (torch.__file__, os.path.dirname(__file__))
)
_DISTRIBUTIONS = os.path.join(_PACKAGES[0], "distributions", "")
# Folders inside the package whose code is the user's, see `count_as_user_code`.
_users: list[str] = []
_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_SITE = ("site-packages", "dist-packages")
# Packages that work for their caller: safetensors reads tensors, so the caller's line is the one that waits,
# and functions of torch that are deprecated are wrapped by typing_extensions.
_HELPERS = tuple(
    os.path.join(os.sep + site, name) for site in _SITE for name in ("safetensors", "typing_extensions.py")
)

# Whether a code object is not the user's. Code objects are few and long-lived.
_is_internal: dict[CodeType, bool] = {}


def _classify(code: CodeType) -> bool:
    path = code.co_filename
    is_package = path.startswith(_PACKAGES) and not path.startswith(tuple(_users))
    internal = is_package or path.startswith(("<frozen ", "<lazystep"))
    internal |= any(name in path for name in _HELPERS)
    if path.startswith(_STDLIB) and not any(name in path for name in _SITE):
        internal = True
    _is_internal[code] = internal
    return internal


def count_as_user_code(file: str) -> None:
    """Take the code in the folder of `file` for the user's, although the folder lies in this package."""
    _users.append(os.path.join(os.path.dirname(os.path.abspath(file)), ""))
    _is_internal.clear()


def is_ours(code: CodeType) -> bool:
    """Whether code is of this package, and is not one of the folders in it whose code is the user's."""
    path = code.co_filename
    return path.startswith(_PACKAGES[1]) and not path.startswith(tuple(_users))


def user_source(depth: int = 1) -> Source | None:
    """The user's line that led here; None in a thread that has no user frame. About 1 µs."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        internal = _is_internal.get(code)
        if internal is None:
            internal = _classify(code)
        if not internal:
            return Source(code, frame.f_lasti)
        frame = frame.f_back
    return None


def user_line(depth: int = 1) -> str:
    """`file:line in function` of the user's line, for messages and counters."""
    source = user_source(depth + 1)
    return str(source) if source is not None else "an unknown line"


def is_in_distributions() -> bool:
    """Whether the user's line came here through torch.distributions, which looks at values."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_internal.get(frame.f_code, True):
        if frame.f_code.co_filename.startswith(_DISTRIBUTIONS):
            return True
        frame = frame.f_back
    return False
