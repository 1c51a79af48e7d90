"""Composite ops that branch on the device, taken down the branch that eager takes on the CPU.

torch decomposes composites before the lazy device sees them, and some of them ask `is_cpu()` on the way:
attention would record its 25-op fallback instead of the flash kernel, an LSTM hundreds of ops instead of one
per layer, dropout another random stream. The kernels here stand at the key `AutogradLazy`, above autograd.
They reimplement small, hot composites in Python, as C++ runs them for CPU tensors. Large ones run their own
C++ on tensors that claim to be on the CPU: see `facade`. A test compares the op lists of CPU and lazy over
torch's module database, so a composite that is missing shows up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..record.tensor import find_handle

aten = torch.ops.aten
# Before, dropout of a complex tensor raises.
_COMPLEX_HAS_REAL_NOISE = torch.__version__ >= "2.15"


def run_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite's own C++ code.

    `func.decompose` would prefer a Python decomposition, which is meant for compilers and takes other steps
    than eager.
    """
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def run_explicit_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the C++ code of an op that is made of other ops, but that autograd differentiates as one op."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeExplicitAutograd")
    key = "CompositeExplicitAutograd" if has_kernel else "CompositeExplicitAutogradNonFunctional"
    return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same type, with memory that nothing touches. Another device's tensor stays."""
    handle = find_handle(tensor)
    if handle is None:
        return tensor  # the op itself is refused, with an error that names it
    type_ = handle.type
    return torch.empty_strided(
        type_.shape, type_.stride, dtype=type_.dtype, device="cpu", requires_grad=tensor.requires_grad
    )


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """CPU's attention: the flash kernel where torch would take it."""
    # torch's own choice, asked about CPU tensors of these types.
    choice = torch._fused_sdp_choice(
        _stand_in(query),
        _stand_in(key),
        _stand_in(value),
        None if attn_mask is None else _stand_in(attn_mask),
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    is_flash = choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
    # Since torch 2.14 the flash kernel is chosen for three dimensions as well, and takes them as one batch.
    is_one_batch = is_flash and query.dim() == 3
    if is_one_batch:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        while attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        minus_inf = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device)
        zero = torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, zero, minus_inf)
    if is_flash:
        out = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
        return out.squeeze(0) if is_one_batch else out
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def dropout(input: torch.Tensor, p: float, train: bool) -> Any:
    """CPU's dropout: a Bernoulli mask scaled by the keep probability."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    dtype = input.dtype.to_real() if _COMPLEX_HAS_REAL_NOISE else input.dtype
    noise = torch.empty_like(input, dtype=dtype).bernoulli_(1 - p)
    return input * aten.div_.Scalar(noise, 1 - p)


def tensor_split(self: torch.Tensor, tensor_indices_or_sections: torch.Tensor, dim: int = 0) -> Any:
    """Wants its indices on the CPU: reads them, which synchronizes."""
    where = tensor_indices_or_sections.tolist()
    return torch.tensor_split(self, where, dim)


def has_compatible_shallow_copy_type(self: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `self.data = other` is possible. torch's own answer for inference tensors is by device."""
    return find_handle(self) is not None and find_handle(other) is not None and self.layout is other.layout


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    aten.dropout.default: dropout,
    aten.tensor_split.tensor_indices_or_sections: tensor_split,
    aten._has_compatible_shallow_copy_type.default: has_compatible_shallow_copy_type,
}

# Ops whose kernels call ops that autocast casts. Eager casts in there. The kernel of a recorded op runs
# later, without autocast, so the parts are recorded instead. tests/conformance/test_autocast.py looks for
# ops that are missing here.
TAKEN_APART = frozenset((aten._trilinear.default, aten.linalg_pinv.atol_rtol_tensor))
