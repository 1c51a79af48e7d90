"""Composite ops that branch on the device, taken down the branch that eager takes on the CPU.

torch decomposes composites before the lazy device sees them, and some of them ask `is_cpu()` on the
way: attention would record its 25-op fallback instead of the flash kernel, an LSTM hundreds of ops
instead of one per layer, dropout another random stream. The kernels here stand at the key
`AutogradLazy`, above autograd, and say what the C++ composite does for CPU tensors. A test compares
the op lists of CPU and lazy over torch's module database, so a composite that is missing shows up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..program.types import TensorType

aten = torch.ops.aten

TypeOf = Callable[[torch.Tensor], TensorType]


def kernels(type_of_lazy: TypeOf) -> dict[Any, Callable[..., Any]]:
    """Op to kernel. `type_of_lazy` gives the type of a lazy tensor, whatever its class is."""

    def stand_in(tensor: torch.Tensor | None) -> torch.Tensor | None:
        """A CPU tensor of the same type, with memory that nobody touches."""
        if tensor is None:
            return None
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
    ) -> torch.Tensor:
        # torch's own choice, asked about CPU tensors of these types.
        choice = torch._fused_sdp_choice(
            stand_in(query),
            stand_in(key),
            stand_in(value),
            stand_in(attn_mask),
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

    return {
        aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
        aten.dropout.default: dropout,
        aten.lstm.input: lstm,
        aten.tensor_split.tensor_indices_or_sections: tensor_split,
    }


def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """CPU's dropout: a Bernoulli mask scaled by the keep probability."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    noise = torch.empty_like(input).bernoulli_(1 - p)
    return input * aten.div_.Scalar(noise, 1 - p)


def tensor_split(self: torch.Tensor, tensor_indices_or_sections: torch.Tensor, dim: int = 0) -> Any:
    """Wants its indices on the CPU: reads them, which synchronizes."""
    where = tensor_indices_or_sections.tolist()
    return torch.tensor_split(self, where, dim)


def lstm(
    input: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """CPU runs one oneDNN kernel per layer and direction where it can."""
    per_layer = 4 if has_biases else 2
    num_directions = 2 if bidirectional else 1
    has_projections = len(params) == (per_layer + 1) * num_layers * num_directions
    if has_projections or not _uses_onednn(input):
        return aten.lstm.input.decompose(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    layer_input = (input.transpose(0, 1) if batch_first else input).contiguous()
    h0, c0 = hx[0].contiguous(), hx[1].contiguous()
    hidden_size = h0.size(2)
    hy, cy = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(num_directions):
            index = layer * num_directions + direction
            weights = params[index * per_layer : (index + 1) * per_layer]
            h, c = h0[index], c0[index]
            if has_biases:
                bias_ih, bias_hh = weights[2], weights[3]
            else:
                bias_hh = torch.zeros(weights[1].shape, dtype=input.dtype, device=input.device)
                bias_ih = torch.zeros(weights[0].shape, dtype=input.dtype, device=input.device)
            result = aten.mkldnn_rnn_layer(
                layer_input,
                weights[0],
                weights[1],
                bias_ih,
                bias_hh,
                h,
                c,
                direction > 0,
                [],
                2,  # LSTM
                hidden_size,
                num_layers,
                has_biases,
                bidirectional,
                batch_first,
                train,
            )
            outputs.append(result[0])
            hy.append(result[1])
            cy.append(result[2])
        layer_input = outputs[0] if num_directions == 1 else torch.cat(outputs, -1)
        if dropout != 0 and train and layer < num_layers - 1:
            layer_input = torch.dropout(layer_input, dropout, True)
    output = layer_input.transpose(0, 1) if batch_first else layer_input
    return output, torch.stack(hy), torch.stack(cy)


def _uses_onednn(input: torch.Tensor) -> bool:
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled) or input.numel() == 0:  # type: ignore[truthy-function]
        return False
    if input.dtype is torch.float32:
        return True
    if input.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    is_half = input.dtype is torch.float16 and not torch.is_grad_enabled()
    return is_half and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
