"""Composite ops that branch on the device, taken down the branch that eager takes on the CPU.

torch decomposes composites before the lazy device sees them, and some of them ask `is_cpu()` on the
way: attention would record its 25-op fallback instead of the flash kernel, an LSTM hundreds of ops
instead of one per layer, dropout another random stream. The kernels here stand at the key
`AutogradLazy`, above autograd. Small, hot composites are said again in Python, as C++ does them for
CPU tensors; large ones (`FACADE_OPS`) run their own C++ on tensors that claim to be on the CPU. A
test compares the op lists of CPU and lazy over torch's module database, so a composite that is
missing shows up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..program.types import TensorType

aten = torch.ops.aten


def run_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite's own C++ code. `func.decompose` would prefer a Python decomposition that is
    meant for compilers and takes other steps than eager."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


# Recurrent layers: they batch the input's products, and use oneDNN's LSTM, on the CPU only.
FACADE_OPS = (
    aten.lstm.input,
    aten.lstm.data,
    aten.gru.input,
    aten.gru.data,
    aten.rnn_tanh.input,
    aten.rnn_tanh.data,
    aten.rnn_relu.input,
    aten.rnn_relu.data,
)

# Composites that mishandle their out= argument when it is a tensor subclass (forget it, or ask whether
# a view of it shares its storage, which wrappers can't answer), and how to compute what belongs there.
_rank = aten.linalg_matrix_rank
_MISHANDLED_OUT = (
    (aten.matmul.default, aten.matmul.out),
    (_rank.default, _rank.out),
    (_rank.tol_tensor, _rank.out_tol_tensor),
    (_rank.atol_rtol_tensor, _rank.atol_rtol_tensor_out),
    (_rank.atol_rtol_float, _rank.atol_rtol_float_out),
)

TypeOf = Callable[[torch.Tensor], TensorType]


def kernels(type_of_lazy: TypeOf, for_subclass: bool) -> dict[Any, Callable[..., Any]]:
    """Op to kernel. `type_of_lazy` gives the type of a lazy tensor, whatever its class is.

    `for_subclass`: lazy tensors are a subclass, for which torch takes further branches of its own.
    """

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor of the same type, with memory that nobody touches."""
        type_ = type_of_lazy(tensor)
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
        # torch's own choice, asked about CPU tensors of these types.
        choice = torch._fused_sdp_choice(
            stand_in(query),
            stand_in(key),
            stand_in(value),
            None if attn_mask is None else stand_in(attn_mask),
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            minus_inf = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device)
            zero = torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, zero, minus_inf)
        if choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
            return aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    found: dict[Any, Callable[..., Any]] = {
        aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
        aten.dropout.default: dropout,
        aten.tensor_split.tensor_indices_or_sections: tensor_split,
    }
    if for_subclass:
        found |= {func: _through_functional(functional) for functional, func in _MISHANDLED_OUT}
        found[aten.matmul.default] = matmul
        found[aten.linalg_svdvals.default] = linalg_svdvals
        found[aten.linalg_eigvalsh.default] = linalg_eigvalsh
        found[aten.linalg_eigvals.default] = linalg_eigvals
    return found


def _through_functional(functional: Any) -> Callable[..., Any]:
    def kernel(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in (*args, out)):
            raise RuntimeError(
                f"{functional}: functions with out=... arguments don't support automatic differentiation, "
                "but one of the arguments requires grad."
            )
        result = functional(*args, **kwargs)
        return out.resize_(result.shape).copy_(result)

    return kernel


def matmul(self: torch.Tensor, other: torch.Tensor) -> Any:
    """A product with a batch of one is one large `mm` for tensor subclasses, and a `bmm` for others
    unless the batch of one needs a gradient."""
    if self.dim() >= 3 and other.dim() >= 3:
        is_one = [math.prod(t.shape[:-2]) == 1 for t in (self, other)]
        if is_one[0] != is_one[1]:
            single = self if is_one[0] else other
            if not (torch.is_grad_enabled() and single.requires_grad):
                batch = torch.broadcast_shapes(self.shape[:-2], other.shape[:-2])
                left = self.expand(*batch, *self.shape[-2:]).reshape(-1, *self.shape[-2:])
                right = other.expand(*batch, *other.shape[-2:]).reshape(-1, *other.shape[-2:])
                return aten._unsafe_view(torch.bmm(left, right), [*batch, self.shape[-2], other.shape[-1]])
    return run_composite(aten.matmul.default, (self, other), {})


def dropout(input: torch.Tensor, p: float, train: bool) -> Any:
    """CPU's dropout: a Bernoulli mask scaled by the keep probability."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    noise = torch.empty_like(input).bernoulli_(1 - p)
    return input * aten.div_.Scalar(noise, 1 - p)


# These compute vectors only where gradients need them; for subclasses torch always does, and the
# values of the longer computation differ in their last bits.


def _needs_grad(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def linalg_svdvals(A: torch.Tensor, *, driver: str | None = None) -> Any:  # noqa: N803
    """Singular values."""
    return aten._linalg_svd(A, False, _needs_grad(A), driver=driver)[1]


def linalg_eigvalsh(A: torch.Tensor, UPLO: str = "L") -> Any:  # noqa: N803
    """Eigenvalues of a Hermitian matrix."""
    return aten._linalg_eigh(A, UPLO, _needs_grad(A))[0]


def linalg_eigvals(self: torch.Tensor) -> Any:
    """Eigenvalues."""
    return aten.linalg_eig(self)[0] if _needs_grad(self) else aten._linalg_eigvals(self)


def tensor_split(self: torch.Tensor, tensor_indices_or_sections: torch.Tensor, dim: int = 0) -> Any:
    """Wants its indices on the CPU: reads them, which synchronizes."""
    where = tensor_indices_or_sections.tolist()
    return torch.tensor_split(self, where, dim)
