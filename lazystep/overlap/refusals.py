"""Checks at set-up: each refuses a model, hook or scaler that can't overlap, and names a way out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from ..errors import UnsupportedError
from .ddp_internals import (
    delays_reductions,
    has_hook,
    hook_name,
    smallest_bucket_bytes,
    uses_python_reducer,
)

# Up to 2.14 torch's quantization hooks take the result of all_gather apart as NCCL fills it.
QUANTIZATION_RUNS_ON_GLOO = torch.__version__ >= "2.15"
_QUANTIZATION_HOOKS = (
    quantization_hooks.quantization_pertensor_hook,
    quantization_hooks.quantization_perchannel_hook,
)


def check_model(ddp: DistributedDataParallel) -> None:
    """Raise for a DDP model whose reductions don't all pass through one hook per bucket."""
    if delays_reductions(ddp):
        raise UnsupportedError(
            "delay_all_reduce_named_params reduces outside the buckets, and does not wait: leave it out"
        )
    if uses_python_reducer(ddp):
        raise UnsupportedError(
            "the python reducer of compiled autograd has no buckets: set torch._dynamo.config.optimize_ddp "
            "to 'ddp_optimizer' before the model is made"
        )
    if ddp.mixed_precision is not None:
        raise UnsupportedError(
            "DDP mixed precision takes the hook slot for its casts: use torch.autocast, or no overlap"
        )
    if ddp.skip_all_reduce_unused_params:
        raise UnsupportedError(
            "skip_all_reduce_unused_params leaves buckets out, the last one perhaps: use "
            "find_unused_parameters=True"
        )
    if ddp.device_type == "cpu" and any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules()):
        raise UnsupportedError("SyncBatchNorm does not run on the CPU: use BatchNorm, or an accelerator")


def check_slot_is_free(ddp: DistributedDataParallel) -> None:
    """Raise if the model already has a communication hook."""
    name = hook_name(ddp)
    if name or has_hook(ddp):
        raise UnsupportedError(
            f"the model has a communication hook already ({name}), and DDP takes only one: make the model "
            "without it and pass it as hook="
        )


def check_hook(ddp: DistributedDataParallel, hook: Any, state: Any) -> None:
    """Raise for a torch hook that fails or hangs on this device and backend."""
    if hook is None:
        return
    if not callable(hook):
        raise TypeError(f"hook: expected a DDP communication hook, got {type(hook).__name__}")
    if ddp.device_type != "cpu":
        return
    if hook is default_hooks.bf16_compress_hook:
        raise UnsupportedError(
            "torch's bf16_compress_hook needs NCCL: use lazystep.overlap.bf16_hook, with the same state"
        )
    if getattr(hook, "__name__", "") == "bf16_compress_wrapper_hook":
        raise UnsupportedError("torch's bf16_compress_wrapper needs NCCL: use lazystep.overlap.bf16_hook")
    if hook in _QUANTIZATION_HOOKS and not QUANTIZATION_RUNS_ON_GLOO:
        raise UnsupportedError(
            f"torch's {hook.__name__} takes the result of all_gather apart as NCCL fills it: on gloo it "
            "raises IndexError before torch 2.15, in plain DDP too. Use fp16_compress_hook or "
            "lazystep.overlap.bf16_hook."
        )
    if hook is post_localSGD_hook.post_localSGD_hook and state.subgroup is None:
        raise UnsupportedError(
            "post_localSGD_hook without a subgroup makes one per machine from its accelerators: pass "
            "PostLocalSGDState(process_group, subgroup, ...)"
        )
    if hook is powerSGD_hook.batched_powerSGD_hook:
        raise UnsupportedError(
            "torch's batched_powerSGD_hook fails, in plain DDP too: its matrices have no batch dimension, "
            "and the orthogonalization asserts one. Use powerSGD_hook with one bucket."
        )
    if hook in (powerSGD_hook.powerSGD_hook, *_QUANTIZATION_HOOKS) and not _one_bucket(ddp):
        if hook in _QUANTIZATION_HOOKS:
            reason = "its callbacks wait for further collectives on the threads that gloo needs for them"
        else:
            reason = "callbacks start collectives in an order that differs between ranks"
        raise UnsupportedError(
            f"torch's {hook.__name__} deadlocks on gloo with several buckets, in plain DDP too: {reason}. "
            "Use bucket_cap_mb= so that all gradients fit one bucket (the first holds 1 MiB "
            "unless bucket_cap_mb is given), or another hook."
        )


def _one_bucket(ddp: DistributedDataParallel) -> bool:
    """Whether all gradients fit into one bucket, before and after DDP rebuilds the buckets."""
    parameters = [p for p in ddp.module.parameters() if p.requires_grad]
    num_bytes = sum(p.numel() * p.element_size() for p in parameters)
    kinds = {(p.dtype, p.device) for p in parameters}
    sparse = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in ddp.module.modules())
    return num_bytes <= smallest_bucket_bytes(ddp) and len(kinds) == 1 and not sparse


def check_scaler(scaler: Any) -> None:
    """Raise for something that is not a GradScaler."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"grad_scaler: expected a torch.amp.GradScaler, got {type(scaler).__name__}")
