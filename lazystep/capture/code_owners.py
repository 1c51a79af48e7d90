"""Whose code it is: the user's, another package's, or our own.

Code of the user's is followed closely. Of torch, Python and other installed packages, globals are compared by
identity only; what such code reads from the user's objects is compared like everything else.
"""

from __future__ import annotations

import enum
import functools
import os
import sys
import sysconfig
import types
from typing import Any

import torch

from ..record.source import is_ours
from . import c_calls, visible
from .values import is_simple

_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
_KNOWN_PACKAGES = frozenset(("torch", "lazystep", "numpy", "builtins"))
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Our code that calls the step's own code, or torch's for it.
_PASSING = {
    os.path.join(_ROOT, *path.split("/"))
    for path in (
        "capture/step.py",
        "device/grad_scaler.py",
        "device/patches.py",
        "device/tensor_methods.py",
        "program/updates.py",
    )
}
# Our code that the step's state passes through: followed as torch's is.
_FOLLOWED = {os.path.join(_ROOT, "distributed", "sharded.py")}
_MODE = os.path.join(_ROOT, "capture", "op_numbers.py")


class CodeKind(enum.IntEnum):
    """How the witness looks at code. Mirrored in src/witness/sink.h."""

    HIDDEN = 0
    USERS = 1
    FOREIGN = 2
    COVER = 3
    OPS = 4


class CodeOwners:
    """Tells the user's code and classes from those of installed packages."""

    def __init__(self, package: str) -> None:
        """`package`: the user's own, even if it is installed."""
        self._package = package

    def kind_of(self, code: types.CodeType, names: dict[str, Any]) -> CodeKind:
        """Whether code is the user's, another package's, or not to be looked at. `names`: its globals."""
        file = code.co_filename
        if file.startswith("<frozen importlib") or str(names.get("__name__")).startswith("namedtuple_"):
            return CodeKind.HIDDEN
        if file == visible.FILE:
            return CodeKind.USERS
        if is_ours(code):
            # What torch's code does for us, such as deciding an op, says nothing of the step.
            if file == _MODE:
                return CodeKind.OPS
            if file in _FOLLOWED:
                return CodeKind.FOREIGN
            return CodeKind.HIDDEN if file in _PASSING else CodeKind.COVER
        if file.startswith("<"):
            return CodeKind.FOREIGN if self.is_foreign(names.get("__name__")) else CodeKind.USERS
        if file.startswith(_TORCH):
            return CodeKind.FOREIGN
        if "site-packages" in file or "dist-packages" in file:
            return CodeKind.FOREIGN if self.is_foreign(names.get("__name__")) else CodeKind.USERS
        return CodeKind.FOREIGN if file.startswith(_STDLIB) else CodeKind.USERS

    def kind_of_frame(self, frame: types.FrameType) -> CodeKind:
        """Whose code runs in a frame."""
        return self.kind_of(frame.f_code, frame.f_globals)

    def is_foreign(self, module: str | None) -> bool:
        """Whether code or a class belongs to an installed package, not to the user's project."""
        package = (module or "").partition(".")[0]
        return package in _KNOWN_PACKAGES or (package != self._package and _is_installed(package))


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether a package comes with Python or is installed in site-packages."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return package in sys.stdlib_module_names
    return "site-packages" in file or "dist-packages" in file or file.startswith(_STDLIB)


def is_torchs(code: types.CodeType) -> bool:
    """Whether code is in a file of torch's."""
    return code.co_filename.startswith(_TORCH)


def asking_frame(frame: types.FrameType) -> types.FrameType | None:
    """The frame, or the one behind it if it is that of a function of torch's that asks for a setting."""
    return frame.f_back if is_torchs(frame.f_code) and c_calls.is_asking(frame.f_code.co_name) else frame


def is_called_by_the_user(frame: types.FrameType, args: tuple[Any, ...]) -> bool:
    """Whether code that is neither torch's nor ours calls a function, with plain values.

    It may do so by a function of torch's that asks for it: `torch.backends.cuda.flash_sdp_enabled`.
    """
    asking = asking_frame(frame)
    if asking is None or is_torchs(asking.f_code) or is_ours(asking.f_code):
        return False
    return all(map(is_simple, args))
