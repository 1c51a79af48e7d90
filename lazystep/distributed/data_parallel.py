"""torch's `DistributedDataParallel` on lazy modules.

The class is torch's own, with its arguments, its forward, `no_sync` and the keys of its state dict. Three
methods that torch calls are replaced, because theirs read the memory of tensors: how gradients are reduced,
how parameters and buffers are broadcast, and how shapes are compared at the start. A new release of torch has
to be checked here.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ..errors import UnsupportedError
from ..ops.collectives import broadcast
from ..process_groups import StepGroup, step_group
from ..record.source import user_line
from .reducer import Reducer, Settings
from .sharded import shard_in_first_step

# torch's hooks that divide and sum, and the type in which they send a bucket.
_HOOKS: dict[Callable[..., Any], torch.dtype | None] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
_SIGNATURE = inspect.signature(TorchDistributedDataParallel.__init__)
_REFUSED = {
    "delay_all_reduce_named_params": "leave it out: reductions overlap with backward by themselves",
    "mixed_precision": "use torch.autocast around forward",
    "skip_all_reduce_unused_params": "use find_unused_parameters=True",
    "device_mesh": "pass the mesh's group as process_group",
}


class DistributedDataParallel(TorchDistributedDataParallel):
    """Data-parallel training of a lazy module: torch's class, recorded. Equals torch's on the CPU to the bit.

        model = DistributedDataParallel(Net().to("lazy"))
        loss_fn(model(x), y).backward()             # reductions are recorded inside backward
        optimizer.step(); optimizer.zero_grad()
        lazystep.mark_step()                        # forward to update: one program

    `torch.nn.parallel.DistributedDataParallel(module)` gives this class for a module on the lazy device.
    Making one is collective, and blocks until the other ranks do so. The first two steps exchange a message
    with rank 0, later ones none.

    `shard_optimizer_state=True`: each rank keeps the optimizer state of its part of the parameters and
    updates that part, as `shard_optimizer` says. Each optimizer of the model is sharded in its first step.
    """

    def __init__(self, *args: Any, shard_optimizer_state: bool = False, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        given.pop("self")
        _refuse_unsupported(given)
        is_synchronized = given.pop("init_sync", True)
        super().__init__(**given, init_sync=False)
        if is_synchronized:
            takes_buffers = given.get("forward_sync_buffers") is not None or self.forward_sync_buffers
            self._synchronize_at_start(takes_buffers)
        if shard_optimizer_state:
            shard_in_first_step(self, self.parameters())

    def _synchronize_at_start(self, takes_buffers: bool) -> None:
        """Compare the shapes of all parameters, and take over rank 0's parameters and buffers."""
        named = [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        _compare_shapes(self._step_group, named)
        states = [parameter.detach() for _, parameter in named]
        if takes_buffers:
            states += [buffer.detach() for buffer in self.modules_buffers]
        self._distributed_broadcast_coalesced(states, self.broadcast_bucket_size)

    # -- what torch's class calls ---------------------------------------------------------------------------

    def _ddp_init_helper(
        self, parameters: list[Tensor], expect_sparse_gradient: list[bool], names: Any, static_graph: bool
    ) -> None:
        limits, rebuilt = self._bucket_config.compute_bucket_size_limits(
            static_graph=static_graph, find_unused_parameters=self.find_unused_parameters
        )
        config = self._bucket_config
        settings = Settings(
            initial_limits=limits,
            rebuilt_limits=rebuilt or [config.first_bucket_bytes_cap, config.bucket_bytes_cap],
            finds_unused=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            divides=self.batched_grad_copy,
        )
        by_id = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self._step_group: StepGroup = step_group(self.process_group)
        self.reducer: Any = Reducer(
            parameters, [by_id[id(p)] for p in parameters], self._step_group, settings
        )
        self.logger = _Logger()

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Record a broadcast of these tensors, in one piece for each data type."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        with torch.no_grad():
            for same in by_type.values():
                flat = torch.cat([tensor.reshape(-1) for tensor in same])
                broadcast(flat, authoritative_rank, self._step_group.name)
                for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """No data: they are of torch's reducer in C++. Lightning asks at the end of a training."""
        return {}

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Use one of torch's hooks for all buckets: `allreduce_hook`, `fp16_compress_hook`,
        `bf16_compress_hook`.

        Other hooks would run while the step is recorded and find no values: they are refused.
        """
        if hook not in _HOOKS or state not in (None, self.process_group):
            _refuse(
                f"the communication hook {getattr(hook, '__name__', hook)!r}",
                "use one of torch's default hooks with the model's own process group",
            )
        if self._comm_hooks:
            raise RuntimeError("register_comm_hook was called before on this model, and a model has one hook")
        # A reducer of its own: captured steps compare which one it is.
        self.reducer = self.reducer.with_hook(_HOOKS[hook])
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        names = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self.register_comm_hook(None, names[comm_hook_type.name])

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a rank without inputs has no step to record."""
        _refuse("join()", "give all ranks the same number of batches (DistributedSampler does)")

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        del state["_step_group"]
        return state


class _Logger:
    """Stands for torch's logger of a C++ reducer, which there is none of here."""

    def set_runtime_stats_and_log(self) -> None:
        """Nothing is measured."""

    def _set_static_graph(self) -> None:
        """Nothing is measured."""

    def set_error_and_log(self, error: str) -> None:
        """The error is raised as well."""


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    for name, remedy in _REFUSED.items():
        if given.get(name):
            _refuse(f"the argument {name}", remedy)
    for module in given["module"].modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            _refuse("SyncBatchNorm", "use BatchNorm, whose statistics are each rank's own")
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            _refuse("an embedding with sparse gradients", "use sparse=False")


def _compare_shapes(group: StepGroup, named: list[tuple[str, Tensor]]) -> None:
    """Raise on all ranks if their parameters differ. Blocks for the other ranks."""
    told = [[name, list(parameter.shape), str(parameter.dtype)] for name, parameter in named]
    key = f"shapes/{group.num_models}"
    group.num_models += 1
    group.store.set(f"{key}/{group.rank}", json.dumps(told))
    for rank in range(group.size):
        group.store.wait([f"{key}/{rank}"], group.timeout)
        theirs = json.loads(group.store.get(f"{key}/{rank}"))
        if theirs != told:
            pairs = list(zip(told, theirs, strict=False))
            mine, other = next(((a, b) for a, b in pairs if a != b), (len(told), len(theirs)))
            raise RuntimeError(
                f"the parameters of the model differ between ranks: {mine} on rank {group.rank}, {other} on "
                f"rank {rank}. All ranks must make the same model."
            )


def _refuse(what: str, remedy: str) -> NoReturn:
    raise UnsupportedError(
        f"DistributedDataParallel on the lazy device does not take {what} (at {user_line()}): {remedy}. "
        "A module on the CPU takes it."
    )
