"""The parts of an optimizer's parameters on this rank: cut, exchanged, and their state put together.

`sharded.py` gives the parts to the optimizer for the time of a step.
"""

from __future__ import annotations

import collections
import json
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

from ..errors import CollectiveError, UnsupportedError
from ..ops.collectives import all_gather
from ..process_groups import StepGroup
from ..record.source import user_line
from ..record.tensor import handle_of
from .partition import Partition, width
from .reducer import row_of


class Shards:
    """This rank's parts of one optimizer's parameters."""

    def __init__(self, ddp: Any, optimizer: Any) -> None:
        self._ddp = weakref.ref(ddp)
        self._group: StepGroup = ddp._step_group
        self._partition = Partition(self._group.size)
        # By parameter: where it is cut. Those that are frozen are not cut.
        self._cuts: dict[Tensor, tuple[int, ...]] = {}
        self._number = self._group.num_sharded  # the same on all ranks, if they shard in the same order
        self._group.num_sharded += 1
        self._num_exchanges = 0
        # By parameter: this rank's part, a view; not there if the part is empty. A parameter that is not cut
        # is its own part.
        self.parts: dict[Tensor, Tensor] = {}
        # By part: the state, which the optimizer has by parameter outside of its steps.
        self.state: dict[Tensor, Any] = collections.defaultdict(dict)
        # By group: what stands in it outside of steps, and inside.
        self.whole_lists: list[list[Tensor]] = []
        self.part_lists: list[list[Tensor]] = []
        self._cut(optimizer)
        for parameter, state in list(optimizer.state.items()):
            optimizer.state[parameter] = self._part_of_state(parameter, state)
            if not optimizer.state[parameter]:
                del optimizer.state[parameter]

    # -- parts -----------------------------------------------------------------------------------------------

    def prepare(self, optimizer: Any) -> None:
        """Have the parts, and their gradients, ready for a step."""
        if self._are_new(optimizer.param_groups):
            self._cut(optimizer)
        with torch.no_grad():
            for parameter, cuts in self._cuts.items():
                first, end = cuts[self._group.rank], cuts[self._group.rank + 1]
                if first == end:
                    continue
                part = self.parts[parameter]
                if handle_of(part).memory is not handle_of(parameter).memory:
                    # `parameter.data = ...` has moved it.
                    self.state.pop(part, None)
                    part = self.parts[parameter] = _part(parameter.detach(), parameter, first, end)
                    self._make_lists(optimizer)
                gradient = parameter.grad
                part.grad = None if gradient is None else _part(gradient, parameter, first, end)

    def exchange(self) -> None:
        """Record how the ranks exchange their updated parts, bucket by bucket."""
        reducer = self._reducer()
        with torch.no_grad():
            for parameter, part in self.parts.items():
                if part is not parameter:
                    part.grad = None
            for bucket in reducer.buckets:
                members = [reducer._parameters[n] for n in bucket]
                self._gather([parameter for parameter in members if parameter in self._cuts])

    def _cut(self, optimizer: Any) -> None:
        """Cut the parameters that have come since the last call. What was cut before stays as it is."""
        theirs = {id(p) for p in self._reducer()._parameters}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._cuts or parameter in self.parts:
                    continue
                if not parameter.requires_grad:
                    self.parts[parameter] = parameter
                    continue
                if id(parameter) not in theirs:
                    refuse(
                        "an optimizer with a parameter whose gradient the model does not reduce",
                        "give that parameter an optimizer of its own",
                    )
                if not is_non_overlapping_and_dense_or_false(parameter):
                    refuse("a parameter whose memory has gaps", "make it contiguous")
                cuts = self._cuts[parameter] = self._partition.add(parameter.numel())
                first, end = cuts[self._group.rank], cuts[self._group.rank + 1]
                if first < end:
                    with torch.no_grad():
                        self.parts[parameter] = _part(parameter.detach(), parameter, first, end)
        self._make_lists(optimizer)

    def _are_new(self, groups: list[dict[str, Any]]) -> bool:
        """Whether groups or parameters have been added."""
        lists = [group["params"] for group in groups]
        return list(map(id, lists)) != list(map(id, self.whole_lists)) or any(
            parameter not in self._cuts and parameter not in self.parts
            for some in lists
            for parameter in some
        )

    def _make_lists(self, optimizer: Any) -> None:
        self.whole_lists = [group["params"] for group in optimizer.param_groups]
        self.part_lists = [
            [self.parts[parameter] for parameter in group if parameter in self.parts]
            for group in self.whole_lists
        ]

    def _reducer(self) -> Any:
        ddp = self._ddp()
        if ddp is None:
            raise RuntimeError(
                "the model of this sharded optimizer is gone: keep the DistributedDataParallel"
            )
        return ddp.reducer

    def _span(self, parameter: Tensor, rank: int | None = None) -> tuple[int, int]:
        rank = self._group.rank if rank is None else rank
        cuts = self._cuts[parameter]
        return cuts[rank], cuts[rank + 1]

    def _gather(self, parameters: list[Tensor]) -> None:
        """Record an all-gather of the parts of some parameters of one type."""
        if not parameters:
            return
        rows = [row_of(parameter.detach(), parameter) for parameter in parameters]
        cuts = [self._cuts[parameter] for parameter in parameters]
        gathered = self._all_gather(rows, cuts)
        targets, sources = [], []
        for row, cut, parts in zip(rows, cuts, gathered, strict=True):
            for rank, part in enumerate(parts):
                if rank != self._group.rank and cut[rank] < cut[rank + 1]:
                    targets.append(row[cut[rank] : cut[rank + 1]])
                    sources.append(part)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _all_gather(self, rows: list[Tensor], cuts: list[tuple[int, ...]]) -> list[list[Tensor]]:
        """The parts of all ranks, by row. This rank's parts are taken from `rows`, in which they are."""
        group = self._group
        widths = [width(cuts, rank) for rank in range(group.size)]
        widest = max(widths)
        own = [row[cut[group.rank] : cut[group.rank + 1]] for row, cut in zip(rows, cuts, strict=True)]
        own = [part for part in own if part.numel()]
        if widest > widths[group.rank]:
            own.append(rows[0].new_zeros(widest - widths[group.rank]))
        out = rows[0].new_empty(widest * group.size)
        all_gather(out, torch.cat(own), group.name)
        found: list[list[Tensor]] = []
        positions = [rank * widest for rank in range(group.size)]
        for cut in cuts:
            parts = []
            for rank in range(group.size):
                size = cut[rank + 1] - cut[rank]
                parts.append(out[positions[rank] : positions[rank] + size])
                positions[rank] += size
            found.append(parts)
        return found

    # -- the whole state -------------------------------------------------------------------------------------

    def gather_state(self, optimizer: Any, packed: dict[str, Any]) -> dict[str, Any]:
        """Put the state of all ranks together. Collective; waits for the values of counters on the device."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        mine = {
            n: packed["state"][n]
            for n, p in enumerate(parameters)
            if n in packed["state"] and p in self._cuts
        }
        told = self._exchange(_described(mine))
        whole = dict(packed["state"])
        # By name and type: the parameters whose state has such a part.
        same: dict[tuple[str, str, str], list[int]] = {}
        for n, parameter in enumerate(parameters):
            if parameter not in self._cuts:
                continue
            owners = [
                r
                for r in range(self._group.size)
                if self._span(parameter, r)[0] < self._span(parameter, r)[1]
            ]
            described = [told[rank].get(str(n), {}) for rank in owners]
            if any(one.keys() != described[0].keys() for one in described):
                raise CollectiveError(
                    f"the ranks have other state for parameter {n} of the optimizer: "
                    f"{[sorted(one) for one in described]} on ranks {owners}. All ranks must update alike."
                )
            if not described or not described[0]:
                continue
            whole[n] = {}
            for name, form in described[0].items():
                whole[n][name] = mine[n][name] if n in mine else _value(form)
                if form["kind"] == "part" and parameter.dim():
                    same.setdefault((name, form["dtype"], form["device"]), []).append(n)
        with torch.no_grad():
            for (name, dtype, device), members in same.items():
                self._gather_parts(
                    name,
                    getattr(torch, dtype),
                    device,
                    [(parameters[n], whole[n], mine.get(n)) for n in members],
                )
        return {**packed, "state": {n: whole[n] for n in sorted(whole)}}

    def local_state(self, optimizer: Any) -> dict[str, Any]:
        """What this rank has, without the others: for a checkpoint, whose loader puts the parts together."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = {parameter: n for n, parameter in enumerate(parameters)}
        groups = [
            {**group, "params": [numbers[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        cuts = {
            numbers[p]: {"shape": list(p.shape), "strides": list(p.stride()), "cuts": list(cut)}
            for p, cut in self._cuts.items()
        }
        state = {numbers[parameter]: dict(values) for parameter, values in optimizer.state.items()}
        return {"state": state, "param_groups": groups, "cuts": cuts}

    def _gather_parts(
        self, name: str, dtype: torch.dtype, device: str, members: list[tuple[Tensor, dict[str, Any], Any]]
    ) -> None:
        cuts = [self._cuts[parameter] for parameter, _, _ in members]
        rows = []
        for parameter, _, mine in members:
            first, end = self._span(parameter)
            row = torch.empty(parameter.numel(), dtype=dtype, device="lazy")
            if mine is not None:
                row[first:end] = mine[name].to("lazy")
            rows.append(row)
        for (parameter, whole, _), parts in zip(members, self._all_gather(rows, cuts), strict=True):
            row = torch.cat(parts).as_strided(parameter.shape, parameter.stride())
            whole[name] = row if device == "lazy" else row.to(device)

    def _exchange(self, told: Any) -> list[Any]:
        """What each rank tells. Blocks for the other ranks, at most for the time-out of the group."""
        group = self._group
        key = f"shards/{self._number}/{self._num_exchanges}"
        self._num_exchanges += 1
        group.store.set(f"{key}/{group.rank}", json.dumps(told))
        found = []
        for rank in range(group.size):
            try:
                group.store.wait([f"{key}/{rank}"], group.timeout)
            except RuntimeError as error:
                raise CollectiveError(
                    f"state_dict() of a sharded optimizer is collective, and rank {rank} has not called it "
                    f"within {group.timeout.total_seconds():g} s. Call it on all ranks, and save what one of "
                    "them gets."
                ) from error
            found.append(json.loads(group.store.get(f"{key}/{rank}")))
        return found

    # -- a part of a whole state -----------------------------------------------------------------------------

    def cut_state(self, optimizer: Any, packed: dict[str, Any]) -> dict[str, Any]:
        """Keep this rank's part of a whole state."""
        self._cut(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [n for group in packed["param_groups"] for n in group["params"]]
        state = dict(packed["state"])
        for number, parameter in zip(numbers, parameters, strict=False):
            if number in state:
                state[number] = self._part_of_state(parameter, state[number])
                if not state[number]:
                    del state[number]
        return {**packed, "state": state}

    def _part_of_state(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        if parameter not in self._cuts:
            return dict(state)
        first, end = self._span(parameter)
        if first == end:
            return {}
        found = {}
        for name, value in state.items():
            is_whole = isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape
            # A copy: the whole is to be freed.
            found[name] = _part(value.detach(), parameter, first, end).clone() if is_whole else value
        return found


def _part(tensor: Tensor, parameter: Tensor, first: int, end: int) -> Tensor:
    """Some elements of a tensor with the shape of a parameter, in the order of the parameter's memory."""
    # A number stays one: its state is then in the same form as the whole state.
    return row_of(tensor, parameter)[first:end] if parameter.dim() else tensor


def _described(state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The state of this rank's parts as JSON: parts by their kind, anything else with its value."""
    found: dict[int, dict[str, Any]] = {}
    # Counters on the device are read together. One more, so that each rank reads something: a read cuts the
    # recording, and all ranks must cut theirs alike.
    waiting: list[tuple[dict[str, Any], Tensor]] = [({}, torch.zeros((), device="lazy"))]
    for n, values in state.items():
        for name, value in values.items():
            form: dict[str, Any]
            if isinstance(value, Tensor) and value.dim() < 2:
                form = {"kind": "part" if value.dim() else "number", "device": value.device.type}
                form["dtype"] = str(value.dtype).removeprefix("torch.")
                if not value.dim():
                    waiting.append((form, value))
            elif value is None or isinstance(value, (bool, int, float, str)):
                form = {"kind": "plain", "value": value}
            else:
                raise UnsupportedError(
                    f"the state {name!r} of a sharded optimizer is {type(value).__name__}"
                    f"{list(value.shape) if isinstance(value, Tensor) else ''}, which can't be put together: "
                    "expected parts of the parameters' shape, numbers and strings. Do not shard it."
                )
            found.setdefault(n, {})[name] = form
    for device in {value.device for _, value in waiting}:
        there = [(form, value) for form, value in waiting if value.device == device]
        for (form, value), number in zip(
            there, torch.stack([value.detach().double() for _, value in there]).tolist(), strict=True
        ):
            form["value"] = number if value.is_floating_point() else int(number)
    return found


def _value(form: Mapping[str, Any]) -> Any:
    """A value that another rank has told; a part comes later."""
    if form["kind"] == "number":
        return torch.tensor(form["value"], dtype=getattr(torch, form["dtype"])).to(form["device"])
    return form.get("value")


def refuse(what: str, remedy: str) -> NoReturn:
    """Raise `UnsupportedError` with the user's line."""
    raise UnsupportedError(f"sharded optimizer state does not take {what} (at {user_line()}): {remedy}.")
