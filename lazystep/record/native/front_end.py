"""The Python side of the native front end: what C++ asks of Python, and the recorder around it.

C++ catches an op, looks its decision up and records it. It comes here for a call that is new
(`_decide`), for everything that is not recorded as it stands (`_dispatch`: draws, reads, tensors of
other devices), and for the user's line of a new instruction. What these do is the Python front
end's own code: semantics stand in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ... import metrics
from ...config import settings, watch
from ...openmp import thread_setter_address
from ..decide import Action, Decision
from ..handle import Handle, use_classes
from ..python import dispatch as python_front_end
from ..python.tensor import use_native
from ..recorder import Draw, RecorderBase
from ..source import user_source
from . import _recorder, patches

_aten = torch.ops.aten

# See `Mode` in src/kernel.cpp.
_RECORD, _PYTHON, _DETACH, _OVERWRITE, _EMPTY, _TO_COPY = range(6)
_MODES = {
    _aten.detach.default: _DETACH,
    _aten.alias.default: _DETACH,
    # Handlers that do something special only for tensors of other devices, which C++ leaves to Python
    # anyway, or for memory that a failed step has left half updated.
    _aten.copy_.default: _OVERWRITE,
    _aten.zero_.default: _OVERWRITE,
    _aten.fill_.Scalar: _OVERWRITE,
    _aten._to_copy.default: _TO_COPY,
    _aten.empty.memory_format: _EMPTY,
    _aten.empty_strided.default: _EMPTY,
    _aten.empty_like.default: _EMPTY,
}


class NativeRecorder(RecorderBase):
    """The recorder of C++. Recording takes a lock of its own; `lock` is for cuts and reads."""

    def record(self, decision: Decision, operands: list[Handle], scalars: list[Any]) -> list[Handle]:
        """Append an op. Returns a handle for each result that is new, then one per rebound operand."""
        return _recorder.record(decision, operands, scalars)

    @property
    def num_entries(self) -> int:
        """How many entries the current recording has."""
        return _recorder.num_entries()

    @property
    def draws(self) -> list[Draw] | None:
        """See `RecorderBase`. As long as there is a list, C++ leaves draws and allocations to Python."""
        return self._draws

    @draws.setter
    def draws(self, draws: list[Draw] | None) -> None:
        self._draws = draws
        _recorder.set_logging(draws is not None)

    layout = _recorder.Layout
    bind = _recorder.Binding
    is_pending = staticmethod(_recorder.is_pending)
    index_in_current = staticmethod(_recorder.index_in_current)
    cut = staticmethod(_recorder.cut)
    peek = staticmethod(_recorder.peek)
    guess_next = staticmethod(_recorder.guess_next)


def register(recorder: NativeRecorder, names: Iterable[str]) -> None:
    """Catch ops on lazy tensors in C++, those of `names` by a kernel of their own. Once per process."""
    use_native(_recorder)
    use_classes(_recorder.Handle, _recorder.Storage)
    python_front_end.call = lambda func, args, kwargs: func(*args, **kwargs)
    watch("max_instructions", _recorder.set_max_entries)
    _recorder.connect(
        traits=_traits,
        decide=_decide,
        dispatch=lambda func, args, kwargs: python_front_end.dispatch(func, args, kwargs),
        source=lambda: user_source(2) if settings.source_lines else None,
        on_full=lambda: recorder.on_full(),
        on_draw=lambda: metrics.count("random_draws"),
        set_num_threads=thread_setter_address(),
    )
    _recorder.register_fallback()
    for name in dict.fromkeys(names):
        register_kernel(name)
    for packet in ("_sparse_compressed_tensor_unsafe", "_sparse_csr_tensor_unsafe"):
        _recorder.register_sparse_kernel(f"aten::{packet}", "")
    patches.apply()
    patches.watch_explicit_kernels(register_kernel)


def register_kernel(name: str) -> None:
    """Catch an op by its name (`aten::add.Tensor`): one that a fallback does not catch."""
    name, _, overload = name.partition(".")
    _recorder.register_kernel(name, overload)


def refuse() -> None:
    """Hand every op to Python from now on, where it is refused."""
    _recorder.refuse()


def _traits(func: Any) -> tuple[int, Sequence[bool], bool, bool, bool]:
    site = python_front_end._site_of(func)
    facts = site.facts
    mode = _MODES.get(func, _RECORD if site.handler is None else _PYTHON)
    takes_number = [i in facts.number_positions for i in range(len(func._schema.arguments))]
    return mode, takes_number, facts.float_literals, site.is_writing, site.needs_nbytes


def _decide(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Decision | None]:
    """What C++ does with a call that it has not seen yet; "python" if it comes here each time."""
    if func is _aten.copy_.default:
        args = args[:2]  # without non_blocking, as the handlers have it
    elif func is _aten._to_copy.default:
        kwargs.pop("non_blocking", None)
    found = python_front_end.look_up(func, args, kwargs)
    if found is None or found.decision.action is Action.HOST:
        return "python", None
    return found.decision.action.value, found.decision
