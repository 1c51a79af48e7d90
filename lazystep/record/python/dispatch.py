"""Ops on lazy tensors, caught in Python: look the decision up, do what it says.

The hot path is `dispatch`: one pass over the arguments builds the key, one dictionary lookup finds
the decision, the recorder appends the entry, and the results are wrapped. Everything else happens
when an op is met for the first time, needs values, or meets tensors of other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ... import metrics
from ...errors import DeviceMismatchError, UnsupportedError
from ...program.types import TensorType, contiguous_stride, type_of
from ..cpu_branch import run_composite
from ..decide import Action, Decision, Operand, OpFacts, decide
from ..handle import Handle, Storage, handle_of_host_tensor
from ..host import eager_dispatch, serial_dispatch
from ..recorder import Draw, Recorder
from ..snapshot import preserve_snapshots
from ..source import user_line
from .tensor import LazyTensor, find_handle, handle_of, is_lazy, retype, wrap

_LITERALS = frozenset([str, torch.dtype, torch.layout, torch.device, torch.memory_format])
_LIST = object()  # marks a list in a key, so that nesting is part of it
_MAX_DECISIONS = 100_000

_recorder: Recorder
_decisions: dict[tuple[Any, ...], Decision] = {}


def install(recorder: Recorder) -> None:
    """Connect the front end to the recorder that it feeds."""
    global _recorder
    _recorder = recorder


def add_composite(func: Any, kernel: Callable[..., Any]) -> None:
    """Run a composite by `kernel` where it arrives whole, under inference mode."""
    _site_of(func).handler = lambda _, args, kwargs: kernel(*args, **kwargs)


def type_of_lazy(tensor: torch.Tensor) -> TensorType:
    """The type of a lazy tensor."""
    return handle_of(tensor).type


def recorder() -> Recorder:
    """The recorder that this front end feeds."""
    return _recorder


def handles(*ops: Any) -> Callable[[Any], Any]:
    """Register a function as the handler of some ops."""

    def register(function: Any) -> Any:
        for op in ops:
            _site_of(op).handler = function
        return function

    return register


class OpSite:
    """What this front end knows of an op."""

    __slots__ = ("facts", "handler", "is_writing", "needs_nbytes", "number_positions")

    def __init__(self, func: Any) -> None:
        self.facts = OpFacts(func)
        self.number_positions = self.facts.number_positions
        self.needs_nbytes = self.facts.needs_nbytes
        self.is_writing = bool(self.facts.writes)
        self.handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None
        # Composites arrive whole only under inference mode; their parts are what eager runs.
        self.handler = _decompose if self.facts.is_composite else None


# By identity: hashing an op runs Python code, an integer's hash does not.
_sites: dict[int, OpSite] = {}


def _site_of(func: Any) -> OpSite:
    site = _sites.get(id(func))
    if site is None:
        site = _sites[id(func)] = OpSite(func)
    return site


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one op on lazy tensors: by its handler if it has one, else decide and record it."""
    site = _sites.get(id(func)) or _site_of(func)
    if site.handler is not None:
        return site.handler(func, args, kwargs)
    return record_op(func, args, kwargs, site)


# What runs an op on lazy tensors from below autograd, for callers that have caught it themselves.
call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] = dispatch


def _torch_dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return dispatch(func, args, kwargs or {})


LazyTensor.__torch_dispatch__ = classmethod(_torch_dispatch)  # type: ignore[assignment]


def refuse(error: Callable[[], Exception]) -> None:
    """Raise `error()` from every op from now on: nothing is checked on the hot path until then."""

    def refuse_op(*args: Any, **kwargs: Any) -> Any:
        raise error()

    globals()["dispatch"] = refuse_op
    LazyTensor.__torch_dispatch__ = classmethod(refuse_op)  # type: ignore[assignment]


class Lookup(NamedTuple):
    """A call whose decision is known, and what of it varies."""

    decision: Decision
    operands: list[torch.Tensor]
    handles: list[Handle]
    scalars: list[Any]


def record_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: OpSite | None = None) -> Any:
    """Look the decision up and do what it says: mostly, append an instruction and wrap its results."""
    found = look_up(func, args, kwargs, site)
    if found is None:
        return _dispatch_mixed(func, args, kwargs)
    decision, operands, handles, scalars = found
    if decision.action is not Action.RECORD:
        return _run_now(decision, args, kwargs)
    made = _recorder.record(decision, handles, scalars)
    if decision.rebinds:
        num_new = len(made) - len(decision.rebinds)
        for rebind, handle in zip(decision.rebinds, made[num_new:], strict=True):
            retype(operands[rebind.operand], handle)
    if decision.structure == "one":
        result = decision.results[0]
        if result is None:
            return None
        return wrap(made[0]) if result.same < 0 else operands[result.same]
    new = iter(made)
    results = [
        None if r is None else operands[r.same] if r.same >= 0 else wrap(next(new)) for r in decision.results
    ]
    return tuple(results) if decision.structure == "tuple" else results


def look_up(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: OpSite | None = None
) -> Lookup | None:
    """The decision for a call; asks the decision core if it is new. None for what can't be recorded."""
    if site is None:
        site = _site_of(func)
    key: list[Any] = [site]
    operands: list[torch.Tensor] = []
    handles: list[Handle] = []
    scalars: list[Any] = []
    for position, arg in enumerate(args):
        kind = type(arg)
        if kind is LazyTensor:
            handle = arg._handle
            key.append(handle.type)
            operands.append(arg)
            handles.append(handle)
        elif kind is int and position not in site.number_positions:
            key.append(arg)
        elif not _flatten(
            arg, position in site.number_positions, site.facts, key, operands, handles, scalars
        ):
            return None
    for name, arg in kwargs.items():
        if name == "device" and arg is not None and arg.type != "lazy":
            return None
        key.append(name)
        is_number = name in site.facts.number_names
        if not _flatten(arg, is_number, site.facts, key, operands, handles, scalars):
            return None
    groups = None
    if site.is_writing and len(handles) > 1:
        groups = _shared_storages(handles)
        if groups is not None:
            key.append(groups)
    if site.needs_nbytes:
        key += [handle.storage.nbytes for handle in handles]
    decision = _decisions.get(tuple(key))
    if decision is None:
        decision = _decide(site.facts, args, kwargs, groups)
        if len(_decisions) >= _MAX_DECISIONS:
            _decisions.clear()
        _decisions[tuple(key)] = decision
    return Lookup(decision, operands, handles, scalars)


def _flatten(
    arg: Any,
    is_number: bool,
    facts: OpFacts,
    key: list[Any],
    operands: list[torch.Tensor],
    handles: list[Handle],
    scalars: list[Any],
) -> bool:
    """Add one argument to the key, the operands and the scalars.

    False for what can't be part of a key: a tensor that is not lazy, or an object with a state.
    """
    kind = type(arg)
    if kind is float or kind is complex or (kind is int and is_number):
        if facts.float_literals:
            key.append((kind, arg))
        else:
            key.append(kind)
            scalars.append(arg)
    elif arg is None or kind is bool or kind is int:
        key.append(arg)
    elif kind is LazyTensor:
        key.append(arg._handle.type)
        operands.append(arg)
        handles.append(arg._handle)
    elif kind is list or kind is tuple:
        if arg and type(arg[0]) is int and not is_number:
            key.append(tuple(arg))
        else:
            key.append(_LIST)
            key.append(len(arg))
            for element in arg:
                if not _flatten(element, is_number, facts, key, operands, handles, scalars):
                    return False
    elif kind in _LITERALS:
        key.append(arg)
    elif kind is torch.Generator:
        key.append(None)  # random ops are decided by their name; the generator is used when drawing
    elif (handle := find_handle(arg)) is not None:
        key.append(handle.type)
        operands.append(arg)
        handles.append(handle)
    else:
        return False
    return True


def _shared_storages(handles: list[Handle]) -> tuple[int, ...] | None:
    """A number per operand, equal where they share a storage; None where none does."""
    storages = [handle.storage for handle in handles]
    if len(set(storages)) == len(storages):
        return None
    return tuple(storages.index(storage) for storage in storages)


def _decide(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], groups: tuple[int, ...] | None
) -> Decision:
    numbers = iter(groups) if groups is not None else None

    def to_operand(arg: Any) -> Any:
        if is_lazy(arg):
            group = next(numbers) if numbers is not None else -1
            return Operand(handle_of(arg).type, handle_of(arg).storage.nbytes, group)
        if type(arg) is list or type(arg) is tuple:
            return [to_operand(a) for a in arg]
        return arg

    taken = tuple(to_operand(a) for a in args)
    taken_kwargs = {k: to_operand(v) for k, v in kwargs.items()}
    try:
        return decide(facts, taken, taken_kwargs)
    except Exception as error:
        # Eager's error does not say which of the ops of a line it was, nor which line of the user's.
        shown = [str(_shown(a)) for a in taken] + [f"{k}={_shown(v)}" for k, v in taken_kwargs.items()]
        error.add_note(
            f"lazystep: raised while recording {facts.name}({', '.join(shown)}) at {user_line()}. "
            "Eager raises this on CPU tensors, too. The op was not recorded: change its arguments there."
        )
        raise


def _shown(arg: Any) -> Any:
    """An argument as a message shows it: a lazy tensor by its type."""
    if type(arg) is Operand:
        return arg.type
    return [_shown(a) for a in arg] if type(arg) is list else arg


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "sparse_compressed" in func._schema.name:
        # These end in a constructor that knows a fixed list of devices.
        return run_on_host(func, args, kwargs, "sparse tensor")
    return run_composite(func, args, kwargs)


def _run_now(decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if decision.action is Action.DRAW:
        return draw(decision.func, args, kwargs)
    return run_on_host(decision.func, args, kwargs, decision.reason)


# -- tensors of other devices ------------------------------------------------------------------

# Arguments that may be CPU tensors of any size beside lazy ones, as they may beside CUDA tensors.
_HOST_INDICES = {torch.ops.aten.index.Tensor: 1, torch.ops.aten.index_put.default: 1}
_HOST_INDICES |= {torch.ops.aten.index_put_.default: 1, torch.ops.aten._index_put_impl_.default: 1}


def _dispatch_mixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op with lazy tensors and others: CPU scalars and index tensors are copied in, the rest refused."""
    device = kwargs.get("device")
    if device is not None and device.type != "lazy":
        return _make_elsewhere(func, args, kwargs)
    facts = _site_of(func).facts
    names = [a.name for a in func._schema.arguments]
    index_position = _HOST_INDICES.get(func, -1)
    took = False

    def take(arg: Any, name: str, position: int) -> Any:
        if type(arg) is list or type(arg) is tuple:
            return [take(a, name, position) for a in arg]
        if not isinstance(arg, torch.Tensor) or is_lazy(arg):
            return arg
        may_mix = arg.device.type == "cpu" and (arg.dim() == 0 or position == index_position)
        if may_mix and name not in facts.writes and arg.layout is torch.strided:
            nonlocal took
            took = True
            return from_host(arg)
        raise _mismatch(func, args, kwargs, name, arg)

    taken = tuple(take(a, names[i], i) for i, a in enumerate(args))
    taken_kwargs = {k: take(v, k, -1) for k, v in kwargs.items()}
    if not took:
        # No tensor is in the way, so it is an object that a program can't hold, such as a storage.
        return run_on_host(func, args, kwargs, "argument that can't be recorded")
    return dispatch(func, taken, taken_kwargs)


def _mismatch(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, tensor: torch.Tensor
) -> Exception:
    where: list[str] = []
    names = [a.name for a in func._schema.arguments]
    for label, arg in [*zip(names, args, strict=False), *kwargs.items()]:
        for leaf in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(leaf, torch.Tensor):
                where.append(f"{label} {list(leaf.shape)} on {leaf.device}")
    text = f"{func} at {user_line()}: all tensors must be on one device, but {', '.join(where)}. "
    if tensor.layout is not torch.strided:
        text += f"{tensor.layout} tensors have no place on the lazy device: compute with them on the CPU."
        return UnsupportedError(text)
    return DeviceMismatchError(text + f'Move {name!r} with .to("lazy").')


def from_host(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy tensor with the values that a host tensor has now: they are copied."""
    with serial_dispatch():
        return wrap(handle_of_host_tensor(tensor.detach().clone()))


def _make_elsewhere(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`zeros_like(lazy, device="cpu")` and its kin: a tensor of another device, from a lazy one's type."""

    def stand_in(arg: Any) -> Any:
        if not is_lazy(arg):
            return arg
        type_ = handle_of(arg).type
        return torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device="cpu")

    with eager_dispatch():
        return func(*(stand_in(a) for a in args), **kwargs)


# -- ops that run now --------------------------------------------------------------------------


def run_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
    """Run an op on real tensors on this thread: it needs values. Synchronizes, counted with the line.

    Waits for its operands; for everything queued if it writes one, since queued steps may read it.
    """
    lazy: list[torch.Tensor] = []

    def collect(arg: Any) -> None:
        if is_lazy(arg):
            lazy.append(arg)
        elif type(arg) is list or type(arg) is tuple:
            for a in arg:
                collect(a)

    collect(args)
    collect(list(kwargs.values()))
    writes = bool(_site_of(func).facts.writes)
    if lazy:
        metrics.count_synchronization(reason, user_line())
        if writes:
            _recorder.synchronize_all()
            preserve_snapshots(handle_of(t).storage for t in lazy)
    # Sparse kernels look at it to decide what to save for backward.
    needs_grad = reason == "sparse tensor" and not writes
    # By tensor identity: an alias per operand, since the op may change its metadata.
    aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_real(arg: Any) -> Any:
        if is_lazy(arg):
            if id(arg) not in aliases:
                real = handle_of(arg).tensor
                assert real is not None
                alias = real.detach()
                if needs_grad and arg.requires_grad:
                    alias.requires_grad_()
                aliases[id(arg)] = arg, alias
            return aliases[id(arg)][1]
        if type(arg) is list or type(arg) is tuple:
            return [to_real(a) for a in arg]
        if type(arg) is torch.device and arg.type == "lazy":
            return torch.device("cpu")
        return arg

    with _recorder.reading([handle_of(t) for t in lazy]), eager_dispatch():
        real_args = [to_real(a) for a in args]
        out = func(*real_args, **{k: to_real(v) for k, v in kwargs.items()})
        return _adopt_results(func, out, list(aliases.values()), writes)


def _adopt_results(
    func: Any, out: Any, aliases: list[tuple[torch.Tensor, torch.Tensor]], writes: bool
) -> Any:
    storages: dict[int, Storage] = {}
    for tensor, real in aliases:
        handle = handle_of(tensor)
        assert handle.tensor is not None
        if handle.type.layout is not torch.strided:
            if writes:
                retype(tensor, handle_of_host_tensor(real))
            continue
        storages[handle.tensor.untyped_storage()._cdata] = handle.storage
        handle.storage.nbytes = handle.tensor.untyped_storage().nbytes()
        if writes and type_of(real) is not handle.type:
            cdata = real.untyped_storage()._cdata
            retype(tensor, handle_of_host_tensor(real, storages.get(cdata)))

    def to_lazy(leaf: Any) -> Any:
        if type(leaf) in (list, tuple) or isinstance(leaf, tuple):
            return (
                type(leaf)(to_lazy(e) for e in leaf)
                if type(leaf) in (list, tuple)
                else tuple(map(to_lazy, leaf))
            )
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for tensor, real in aliases:
            if real is leaf:
                return tensor
        if leaf.is_quantized or leaf.is_mkldnn or leaf.is_nested:
            raise UnsupportedError(
                f"{func} at {user_line()}: the lazy device has no quantized, nested or mkldnn tensors. "
                "Move the tensor to the CPU first: .cpu()"
            )
        if leaf.layout is not torch.strided:
            return wrap(handle_of_host_tensor(leaf))
        cdata = leaf.untyped_storage()._cdata
        handle = handle_of_host_tensor(leaf, storages.get(cdata))
        storages[cdata] = handle.storage
        return wrap(handle)

    return to_lazy(out)


def draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw random numbers now, in eager's place in the generator's stream; they become inputs."""
    metrics.count("random_draws")
    written: torch.Tensor | None = None
    writes = _site_of(func).facts.writes

    def to_real(arg: Any) -> Any:
        nonlocal written
        if is_lazy(arg):
            handle = handle_of(arg)
            if writes:
                written = arg
                if handle.pristine:
                    return handle.tensor
            type_ = handle.type
            return torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device="cpu")
        if type(arg) is torch.device and arg.type == "lazy":
            return torch.device("cpu")
        return arg

    with serial_dispatch():
        real_args = [to_real(a) for a in args]
        out = func(*real_args, **{k: to_real(v) for k, v in kwargs.items()})
        if written is not None and handle_of(written).pristine:
            _log_draw(handle_of(written), func, args, kwargs)
            return written
        drawn = wrap(handle_of_host_tensor(out))
    _log_draw(handle_of(drawn), func, args, kwargs)
    if written is None:
        return drawn
    return dispatch(torch.ops.aten.copy_.default, (written, drawn), {})


def _log_draw(handle: Handle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _recorder.draws is None:
        return

    def template(arg: Any) -> Any:
        if type(arg) is torch.device:
            return torch.device("cpu")
        return handle_of(arg).type if is_lazy(arg) else arg

    fixed_args = [template(a) for a in args]
    fixed_kwargs = {name: template(a) for name, a in kwargs.items()}

    def fresh(arg: Any) -> Any:
        if type(arg) is TensorType:
            return torch.empty_strided(arg.shape, arg.stride, dtype=arg.dtype)
        return arg

    def again() -> torch.Tensor:
        with serial_dispatch():
            drawn: torch.Tensor = func(
                *(fresh(a) for a in fixed_args), **{name: fresh(a) for name, a in fixed_kwargs.items()}
            )
            return drawn

    _recorder.draws.append(Draw(handle, again, kwargs.get("generator")))


# -- handlers ----------------------------------------------------------------------------------

_aten = torch.ops.aten


@handles(_aten.detach.default, _aten.alias.default)
def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Nothing is computed: another tensor for the same value.
    return wrap(handle_of(args[0]))


@handles(_aten._pack_padded_sequence.default)
def _pack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Lengths and batch sizes live on the CPU on every device; the rest is made of plain ops.
    return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


@handles(torch.ops.prim.layout.default)
def _layout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return handle_of(args[0]).type.layout


@handles(_aten.lift_fresh.default, _aten.lift.default)
def _lift(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


@handles(
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_permuted.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
def _empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate on the host right away: what follows is mostly a copy from the host or a draw."""
    device = kwargs.get("device")
    if device is not None and device.type != "lazy":
        return _make_elsewhere(func, args, kwargs)
    out = _make_elsewhere(func, args, {**kwargs, "device": torch.device("cpu")})
    with eager_dispatch():
        handle = handle_of_host_tensor(out)
        handle.pristine = out.layout is torch.strided
    _log_draw(handle, torch.empty_like, (wrap(handle),), {})
    return wrap(handle)


@handles(_aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not is_lazy(target):
        # Lazy to host: the caller's tensor gets the values now.
        return _copy_to_host(func, target, source)
    handle = handle_of(target)
    if not is_lazy(source):
        if source.device.type != "cpu":
            raise _mismatch(func, args, kwargs, "src", source)
        if handle.pristine:
            assert handle.tensor is not None
            with serial_dispatch():
                handle.tensor.copy_(source)
            if _recorder.draws is not None:  # not fresh memory any more, but the host's values
                _recorder.draws[:] = [d for d in _recorder.draws if d.handle is not handle]
            return target
        source = from_host(source)
    if handle.storage.error is not None and _covers_storage(handle):
        handle.storage.error = None  # overwritten as a whole: what the failed step left is gone
    return record_op(func, (target, source), {})


def _covers_storage(handle: Handle) -> bool:
    type_ = handle.type
    is_dense = type_.offset == 0 and type_.stride == contiguous_stride(type_.shape)
    return is_dense and type_.extent == handle.storage.nbytes


@handles(_aten.zero_.default, _aten.fill_.Scalar)
def _fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handle = handle_of(args[0])
    if handle.storage.error is not None and _covers_storage(handle):
        handle.storage.error = None
    return record_op(func, args, kwargs)


def _copy_to_host(func: Any, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    metrics.count_synchronization("to host", user_line())
    with _recorder.reading([handle_of(source)]), serial_dispatch():
        func(target, handle_of(source).tensor)
    return target


@handles(_aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    device = kwargs.get("device")
    if not is_lazy(source):
        with serial_dispatch():
            moved = func(source, **{**kwargs, "device": torch.device("cpu"), "non_blocking": False})
            return wrap(handle_of_host_tensor(moved))
    if device is None or device.type == "lazy":
        return record_op(func, args, {k: v for k, v in kwargs.items() if k != "non_blocking"})
    if device.type == "meta":
        type_ = handle_of(source).type
        return torch.empty_strided(
            type_.shape, type_.stride, dtype=kwargs.get("dtype") or type_.dtype, device=device
        )
    metrics.count_synchronization("to host", user_line())
    with _recorder.reading([handle_of(source)]), serial_dispatch():
        return func(handle_of(source).tensor, **kwargs)
