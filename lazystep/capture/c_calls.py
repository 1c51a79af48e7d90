"""Functions in C: what each may look at. The witness sees into Python code, but not into C.

A function that is not in these tables may look at everything that it is given: containers as a whole, and all
attributes of objects. That is compared before a replay. A function whose answer depends on anything else (the
clock, files, other processes) is *impure*: a call that uses it is not captured.
"""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import _thread
import bisect
import collections
import contextvars
import ctypes
import datetime
import decimal
import enum
import functools
import gc
import io
import itertools
import operator
import os
import pickle
import queue
import select
import socket
import sys
import time
import types
import warnings
import weakref
from typing import Any

import numpy as np
import torch

from .traced import can_follow


class CallClass(enum.IntEnum):
    """How the witness treats the arguments of a function in C. Mirrored in src/witness/sink.h."""

    SCAN = 0  # may look at everything that it is given
    IGNORE = 1  # looks at no contents of its arguments
    MOVE = 2  # takes containers as a whole, and passes on what is in them: traced numbers stay traced
    GETATTR = 3
    SETATTR = 4
    TOLD = 5  # the witness wants to know of each call
    FOLLOW = 6  # there is a version that follows numbers
    GETITEM = 7
    TYPE_OF = 8
    PASS = 9  # as MOVE, but it looks at no more than the elements of a container
    SIZE = 10  # as PASS, but at no more than its length or keys
    CALLING = 11  # as MOVE, and calls the first of its arguments
    SORTING = 12  # as MOVE, and compares or adds elements; may call an argument that is not the first
    KINDS = 13  # as IGNORE, but the second argument is a class or a tuple of classes, which is looked at
    INDEXING = 14  # as PASS, but an int among the arguments may be an index
    SEARCHING = 15  # as MOVE, but an int among the arguments may be an index
    COPYING = 16  # as PASS, and makes a container of the elements: numbers in it are followed


_IGNORE = {callable, super, globals, locals, print, weakref.ref}
_IGNORE |= {sys.exc_info, _thread.allocate_lock}
# What they do does not happen in a replay. What they return says nothing.
_EFFECTS = {gc.collect, gc.enable, gc.disable, gc.freeze, gc.unfreeze, dir}
_OF_OBJECTS = {
    sys.getsizeof,
    sys.getrefcount,
    gc.get_referents,
    gc.get_referrers,
    gc.is_tracked,
    gc.is_finalized,
}
_ASKING = ("get", "is_", "are_", "has_")
_OF_ACCELERATORS = ("cuda_is", "xpu_is", "mps_is", "mtia_is", "accelerator_is")
_STATEFUL_MODULES = frozenset(
    (
        "sys",
        "gc",
        "signal",
        "_signal",
        "posix",
        "os",
        "_locale",
        "_socket",
        "_thread",
        "resource",
        "torch",
        "torch._C",
    )
)
_IGNORE |= {functools.partial, property, staticmethod, classmethod, types.MethodType, _thread.get_ident}
_PASS = {iter, zip, reversed}
_COPYING = {list, tuple, dict, list.copy, dict.copy}
_COMPARING = ("count", "remove", "__eq__", "__contains__")
_HASHING = ("fromkeys", "add", "discard")
_STORING = (
    "append",
    "appendleft",
    "extend",
    "extendleft",
    "update",
    "__init__",
    "__add__",
    "__iadd__",
    "__ior__",
)
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_GETATTR = {getattr, hasattr, object.__getattribute__, type.__getattribute__}
_SETATTR = {setattr, delattr, object.__setattr__, object.__delattr__}
_GETITEM = {dict.get, dict.setdefault, dict.__getitem__}


_C_FUNCTION: type = ctypes._CFuncPtr  # type: ignore[attr-defined]
POINTERS = (ctypes._Pointer, _C_FUNCTION, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar_p)
"""What stands for memory that nobody compares."""
DATES = (datetime.date, datetime.time)
DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
USES_OF_DESCRIPTORS = ("__get__", "__set__", "__delete__")
_OF_FILES = ("read", "readline", "readlines", "readinto", "read1", "peek", "getvalue", "getbuffer", "tell")


# Functions of `os` that ask the system for nothing, write only, or are settings of the process.
_OF_OS = (
    "fspath strerror major minor makedev device_encoding waitstatus_to_exitcode WCOREDUMP WIFCONTINUED "
    "WIFSTOPPED WIFSIGNALED WIFEXITED WEXITSTATUS WTERMSIG WSTOPSIG putenv unsetenv write writev fsync "
    "fdatasync sync sched_yield register_at_fork cpu_count process_cpu_count uname sysconf confstr"
)
_CHANGING_SETTINGS = ("getcwd", "getcwdb", "getloadavg", "getrandom")


def _asks_the_system(name: str, function: Any) -> bool:
    """Whether a function of `os` asks for files, processes and the like, if only by an error."""
    is_of_c = isinstance(function, types.BuiltinFunctionType) and function.__module__ == os.name
    is_compared = name.startswith((*_ASKING, "_")) and name not in _CHANGING_SETTINGS
    return is_of_c and not is_compared and name not in _OF_OS.split()


def _impure() -> set[Any]:
    found: set[Any] = {open, io.open, input, gc.get_objects, gc.get_referrers, gc.get_count, sys._getframe}
    found |= {sys.getrefcount, datetime.datetime.now, datetime.datetime.utcnow}
    # From Python 3.13 on, `threading` starts its threads by another function.
    found |= {f for name, f in vars(_thread).items() if name.startswith("start_")}
    found |= {
        datetime.datetime.today,
        datetime.date.today,
        queue.SimpleQueue.get,
        queue.SimpleQueue.get_nowait,
        queue.SimpleQueue.put,  # work for another thread, such as a pool's
        queue.SimpleQueue.put_nowait,
    }
    found |= {pickle.dumps, pickle.loads, pickle.load, torch.seed, torch.initial_seed}
    for module in (time, select, socket):
        found |= {f for name, f in vars(module).items() if isinstance(f, types.BuiltinFunctionType)}
    found -= {time.sleep, time.strptime}
    found |= {f for name, f in vars(os).items() if _asks_the_system(name, f)}
    for kind in (io.TextIOWrapper, io.BufferedReader, io.FileIO, io.StringIO, io.BytesIO):
        found |= {vars(kind)[name] for name in _OF_FILES if name in vars(kind)}
    found |= {vars(kind)["locked"] for kind in (type(_thread.allocate_lock()),)}
    found |= {vars(torch._C.StorageBase)[name] for name in ("nbytes", "data_ptr", "is_shared")}
    found |= {weakref.getweakrefcount, weakref.getweakrefs}
    found |= {vars(functools._lru_cache_wrapper)[name] for name in ("cache_info", "cache_clear")}
    return found


_IMPURE = _impure()
_LOCKS: tuple[type, ...] = (type(_thread.allocate_lock()), type(_thread.RLock()))
# Types in C whose objects hold nothing that could change, or nothing that a step's numbers depend on.
_HARMLESS: tuple[type, ...] = (
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    types.CellType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.FrameType,
    types.TracebackType,
    types.GenericAlias,
    types.UnionType,
    property,
    staticmethod,
    classmethod,
    super,
    slice,
    BaseException,
    weakref.ref,
    contextvars.ContextVar,
    contextvars.Token,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    io.IOBase,
    np.ufunc,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    *_LOCKS,
)
_HARMLESS_PACKAGES = ("torch", "re", "decimal", "_decimal", "functools", "operator", "typing", "numpy")


def is_harmless(value: Any) -> bool:
    """Whether C code that looks at an object sees nothing of it that could change."""
    return isinstance(value, _HARMLESS) or type(value).__module__.partition(".")[0] in _HARMLESS_PACKAGES


def name_of(function: Any) -> str:
    """A function's name in messages."""
    module = getattr(function, "__module__", None) or ""
    name = str(getattr(function, "__qualname__", None) or getattr(function, "__name__", repr(function)))
    return name if module in ("", "builtins") else f"{module}.{name}"


def is_impure(function: Any) -> bool:
    """Whether what a function returns depends on more than its arguments and compared state."""
    return isinstance(function, _C_FUNCTION) or _is_in(unbound(function), _IMPURE)


def unbound(function: Any) -> Any:
    """A method in C as it is without its object, a class method as that of the class that has it.

    Any other function as it is.
    """
    owner = getattr(function, "__self__", None)
    if not isinstance(function, types.BuiltinMethodType) or isinstance(owner, types.ModuleType):
        return function
    if not isinstance(owner, type):
        return getattr(type(owner), function.__name__, function)
    for base in owner.__mro__:
        method = base.__dict__.get(function.__name__)
        if isinstance(method, types.ClassMethodDescriptorType):
            return method.__get__(None, base)
    return function


def reads_generator(function: Any) -> bool:
    """Whether a function reads or sets the state of a `torch.Generator`."""
    is_method = getattr(function, "__objclass__", None) is torch.Generator
    is_method |= isinstance(getattr(function, "__self__", None), torch.Generator)
    return is_method and getattr(function, "__name__", "") in _GENERATOR_STATE


def tells_state(function: Any) -> bool:
    """Whether a function returns a setting of the process, such as `sys.getrecursionlimit`."""
    if not _is_of_module(function):
        return False
    module, name = str(function.__module__ or ""), str(function.__name__).lstrip("_")
    # Builds with CUDA have questions such as `_cuda_isCurrentStreamCapturing`, which models ask in each step.
    is_setting = module in _STATEFUL_MODULES and name.startswith((*_ASKING, "isenabled", *_OF_ACCELERATORS))
    return is_setting and function not in _IGNORE | _OF_OBJECTS


def answer_of(function: Any, args: tuple[Any, ...]) -> Any:
    """What a function tells; the kind of the exception if it raises one, which the step has caught then."""
    try:
        return function(*args)
    except Exception as error:
        return type(error)


def is_asking(name: str) -> bool:
    """Whether a Python function of this name returns a setting, and does little else."""
    return name in ("__get__", "__hash__") or name.startswith(_ASKING) or name.endswith("enabled")


def may_tell_state(function: Any) -> bool:
    """Whether a function, if it is given nothing, may return a state that nothing else tells."""
    return _is_of_module(function) and not any(_is_in(function, known) for known in (_IGNORE, _EFFECTS))


def _is_of_module(function: Any) -> bool:
    """Whether it is a function in C that belongs to a module, and no method."""
    owner = getattr(function, "__self__", None)
    is_function = isinstance(function, types.BuiltinFunctionType) and not isinstance(owner, type)
    return is_function and (owner is None or type(owner).__name__ in ("module", "PyCapsule"))


def asks_for_offset(function: Any) -> bool:
    """Whether a function tells where a tensor begins in its memory, which differs between slices."""
    owner = getattr(function, "__objclass__", None) or type(getattr(function, "__self__", None))
    return getattr(function, "__name__", "") == "storage_offset" and issubclass(owner, torch._C.TensorBase)


def asks_for_view(function: Any) -> bool:
    """Whether a function tells whether a tensor is a view of another one."""
    owner = getattr(function, "__objclass__", None) or type(getattr(function, "__self__", None))
    return getattr(function, "__name__", "") == "_is_view" and issubclass(owner, torch._C.TensorBase)


def is_of_descriptor(function: Any) -> bool:
    """Whether a function reads or writes an attribute by its descriptor, the first argument."""
    return _is_in(function, _OF_DESCRIPTORS)


def asks_lock(function: Any) -> bool:
    """Whether a function may tell who holds a lock. Taking it without conditions tells nothing."""
    names = ("acquire", "_is_owned", "_recursion_count")
    owner = getattr(function, "__objclass__", None) or type(getattr(function, "__self__", None))
    return issubclass(owner, _LOCKS) and getattr(function, "__name__", "") in names


def asks_abstract_class(function: Any) -> bool:
    """Whether a function asks an abstract class, which other classes are registered with."""
    return _is_in(function, _ABSTRACT)


def _is_torch_function(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    is_of_torch = isinstance(function, types.BuiltinFunctionType) and function.__module__ == "torch"
    return is_of_torch and (hasattr(torch._C._VariableFunctions, name) or function is torch.from_numpy)


def is_scripted(function: Any) -> bool:
    """Whether a function is a method of a scripted module, which keeps its attributes out of sight."""
    return isinstance(function, torch.ScriptMethod)


def is_warning(function: Any) -> bool:
    """Whether a function warns, which may raise."""
    return _is_in(function, _WARNING)


def warning_filters() -> tuple[Any, ...]:
    """What happens to warnings."""
    return tuple(warnings.filters)


def is_formatting(function: Any) -> bool:
    """Whether a function fills a text, and may take attributes of attributes of what it is given."""
    return getattr(function, "__name__", "") in ("format", "format_map") and (
        getattr(function, "__objclass__", None) is str or isinstance(getattr(function, "__self__", None), str)
    )


def is_decimal(function: Any) -> bool:
    """Whether a function computes with decimal numbers."""
    return function is decimal.Decimal or _is_method_of(function, (decimal.Decimal, decimal.Context))


def is_of_dates(function: Any) -> bool:
    """Whether a function makes or uses a date, of which the time zone of the process may be a part."""
    return (isinstance(function, type) and issubclass(function, DATES)) or _is_method_of(function, DATES)


def _is_method_of(function: Any, kinds: tuple[type, ...]) -> bool:
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    return isinstance(owner, kinds) or (isinstance(owner, type) and issubclass(owner, kinds))


def time_zone() -> tuple[Any, ...]:
    """The time zone of the process. Two zones may have the same name and offset now, and not before."""
    return os.environ.get("TZ"), time.tzname, time.timezone, time.altzone, time.daylight


def is_numpys(function: Any) -> bool:
    """Whether a function in C computes with NumPy, which may warn or raise instead."""
    owner = getattr(function, "__objclass__", None) or type(getattr(function, "__self__", None))
    of_numpy = isinstance(function, np.ufunc) or issubclass(owner, (np.ndarray, np.generic))
    return of_numpy or str(getattr(function, "__module__", None)).partition(".")[0] == "numpy"


def numpy_errors() -> tuple[Any, ...]:
    """What NumPy does about a division by zero and the like."""
    return tuple(np.geterr().items())


class DecimalSettings:
    """Tells the settings of a decimal context; without one, of the thread's."""

    def __init__(self, context: decimal.Context | None) -> None:
        self.context = context

    def __call__(self) -> tuple[Any, ...]:
        """Precision, rounding, limits and traps."""
        context = decimal.getcontext() if self.context is None else self.context
        limits = context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp
        return *limits, *(signal.__name__ for signal, is_trapped in context.traps.items() if is_trapped)


def classify(function: Any) -> CallClass:
    """How to treat the arguments of a call of this object, which may run no Python code."""
    if can_follow(function) or function is gc.get_threshold:
        return CallClass.FOLLOW
    if is_impure(function) or function is next or reads_generator(function) or asks_for_offset(function):
        return CallClass.TOLD
    if isinstance(function, _TOLD_TYPES) or _is_in(unbound(function), _TOLD):
        return CallClass.TOLD
    if is_decimal(function) or is_of_dates(function):
        return CallClass.TOLD
    for functions, found in _CLASSES:
        if _is_in(function, functions):
            return found
    if any(asks(function) for asks in (is_warning, is_formatting, is_scripted, asks_for_view, asks_lock)):
        return CallClass.TOLD
    if function is type:
        return CallClass.TYPE_OF
    if tells_state(function):
        return CallClass.TOLD
    if getattr(function, "__name__", "") in ("__instancecheck__", "__subclasscheck__", "__get__"):
        return CallClass.IGNORE
    if getattr(function, "__name__", "") == "__hash__":
        return CallClass.MOVE  # a tuple's is made of all that is in it
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    kind = owner if isinstance(owner, type) else type(owner)
    if (
        kind in _OP_OWNERS
        or getattr(function, "__module__", None) in _OP_MODULES
        or _is_torch_function(function)
    ):
        return CallClass.MOVE  # `OpNumbers` looks after its numbers
    if issubclass(kind, dict) and getattr(function, "__name__", "") in ("get", "setdefault", "__getitem__"):
        return CallClass.GETITEM
    if not issubclass(kind, _CONTAINERS):
        return CallClass.SCAN
    name = getattr(function, "__name__", "")
    if name in ("keys", "__len__"):
        return CallClass.SIZE
    if name == "sort":
        return CallClass.SORTING
    if name == "index":
        return CallClass.SEARCHING
    if name in _COMPARING or name in _HASHING:
        return CallClass.MOVE
    return CallClass.PASS if name in _STORING else CallClass.INDEXING


_TOLD_TYPES = (
    functools.partial,
    weakref.ref,
    types.MethodWrapperType,
    functools._lru_cache_wrapper,
    operator.attrgetter,
    operator.methodcaller,
)
# The functions that a torch function mode sees.
_OP_OWNERS = (torch._C.TensorBase, torch.Tensor)
_OP_MODULES = tuple(
    f"torch._C.{name}" for name in ("_nn", "_fft", "_linalg", "_special", "_nested", "_sparse")
)
_GENERATOR_STATE = (
    "get_state",
    "set_state",
    "initial_seed",
    "seed",
    "get_offset",
    "set_offset",
    "clone_state",
)
_CALLING = {map, filter, functools.reduce, itertools.starmap}
_CALLING |= {itertools.takewhile, itertools.dropwhile, itertools.filterfalse}
# They compare and add elements, which traced numbers follow.
_SORTING = {sorted, min, max, itertools.accumulate, itertools.groupby}
_SORTING |= {bisect.bisect_left, bisect.bisect_right, bisect.insort_left, bisect.insort_right}
_WARNING = {warnings.warn, warnings.warn_explicit}
_ABSTRACT = {_abc._abc_instancecheck, _abc._abc_subclasscheck}
_OF_DESCRIPTORS = {vars(kind)[name] for kind in DESCRIPTORS for name in USES_OF_DESCRIPTORS}
_TOLD = {
    id,
    operator.is_,
    operator.is_not,
    vars,
    dict.update,
    contextvars.ContextVar.get,
    contextvars.ContextVar.set,
}
_TOLD |= _ABSTRACT | _OF_DESCRIPTORS
_CLASSES = (
    (_IGNORE, CallClass.IGNORE),
    (_CALLING, CallClass.CALLING),
    (_SORTING, CallClass.SORTING),
    (_PASS, CallClass.PASS),
    (_COPYING, CallClass.COPYING),
    ({enumerate}, CallClass.INDEXING),
    ({len}, CallClass.SIZE),
    ({hash}, CallClass.MOVE),
    ({isinstance, issubclass}, CallClass.KINDS),
    (_GETATTR, CallClass.GETATTR),
    (_SETATTR, CallClass.SETATTR),
    (_GETITEM, CallClass.GETITEM),
)


def _is_in(function: Any, functions: set[Any]) -> bool:
    try:
        return function in functions
    except TypeError:  # it can't be hashed
        return False
