"""What the models of Transformers ask of the values of masks and positions, answered without a wait.

In each forward pass a model asks whether its padding mask masks anything, and whether the positions of the
tokens are those of one sequence or of several packed ones. The answers decide which attention kernel runs. On
the lazy device each question would end the step and wait for it.

- A padding mask comes from a batch, and the lazy device still has the CPU tensor that was copied. The answer
  comes from there. In a captured step, whose Python does not run, the caller asks `is_full` outside and tells
  the answer by `tell`.
- Positions that came with the batch are looked at in the same way. Those that the model makes itself are
  taken to be consecutive; a closure checks it and raises `UnsupportedError` if they are not.

Three private functions of `transformers.masking_utils` are replaced (`install`). For tensors of other
devices, and wherever nothing is known, they do what they did before. Models of Transformers are trained by
Accelerate and Lightning, too, whose integrations do not need the package: they call `install_if_used`.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import UnsupportedError
from ..record import observer
from ..record.tensor import find_handle, is_lazy
from ..step_closures import add_step_closure

_ANSWER = "_lazystep_is_full"  # an attribute of a mask


def is_full(mask: torch.Tensor) -> bool | None:
    """Whether no element of the mask is 0; None if that is not known on the host. Does not synchronize."""
    host = _host_value(mask)
    return None if host is None else bool(host.all())


def tell(mask: torch.Tensor, answer: bool | None) -> None:
    """Say whether the mask is full, in a captured step."""
    if answer is not None:
        setattr(mask, _ANSWER, answer)


def answers_of(batch: Mapping[str, Any]) -> tuple[tuple[str, bool | None], ...]:
    """For each mask of a batch whether it is full: a part of the key of a captured step. No wait."""
    return tuple(
        (name, is_full(value))
        for name, value in batch.items()
        if isinstance(name, str)
        and name.endswith("mask")
        and isinstance(value, torch.Tensor)
        and value.dim() == 2
    )


def told(batch: Any, answers: tuple[tuple[str, bool | None], ...]) -> Any:
    """A copy of the batch whose masks know the answers. Called inside a captured step."""
    # Models ask arguments for attributes that they do not have. A capture can't compare those of an argument,
    # which is another object in each call, but a tensor made inside needs no comparison.
    copied = copy.copy(batch)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            copied[name] = value.detach()
    for name, answer in answers:
        tell(copied[name], answer)
    return copied


def install_if_used() -> None:
    """`install`, if this process has imported Transformers."""
    if "transformers" in sys.modules:
        install()


def install() -> None:
    """Replace the functions of Transformers that look at values, once in a process."""
    from transformers import masking_utils  # not at the top: see `install_if_used`

    for name, replacement in (
        ("_preprocess_mask_arguments", _preprocess),
        ("_ignore_causal_mask_sdpa", _ignore_causal),
        ("_ignore_bidirectional_mask_sdpa", _ignore_bidirectional),
    ):
        original = getattr(masking_utils, name)
        if not hasattr(original, "_lazystep_original"):
            replaced = functools.wraps(original)(functools.partial(replacement, original))
            replaced._lazystep_original = original  # type: ignore[attr-defined]
            setattr(masking_utils, name, replaced)


def _preprocess(
    original: Callable[..., Any],
    config: Any,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    past_key_values: Any,
    position_ids: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    packed = None
    if (
        is_lazy(inputs_embeds)
        and position_ids is not None
        and attention_mask is None
        and past_key_values is None
    ):
        packed = _packed_sequences(position_ids, inputs_embeds.shape[0])
        position_ids = None
    result = list(
        original(config, inputs_embeds, attention_mask, past_key_values, position_ids, *args, **kwargs)
    )
    if packed is not None:
        result[2] = packed.to(inputs_embeds.device)
    if is_lazy(attention_mask) and result[1] is not None and attention_mask.dim() == 2:
        mask = _whole(attention_mask)  # some models reshape it
        answer = getattr(mask, _ANSWER, None)
        tell(result[1], is_full(mask) if answer is None else answer)
    return tuple(result)


def _packed_sequences(positions: torch.Tensor, batch_size: int) -> torch.Tensor | None:
    """What `find_packed_sequence_indices` says, on the CPU; None if there is one sequence in each row."""
    host = _host_value(positions)
    if host is not None:
        from transformers import masking_utils

        packed: torch.Tensor | None = masking_utils.find_packed_sequence_indices(host.expand(batch_size, -1))
        return packed
    add_step_closure(_check_positions, ((torch.diff(positions, dim=-1) == 1).all(),), run_async=True)
    return None


def _check_positions(are_consecutive: torch.Tensor) -> None:
    if not are_consecutive:
        raise UnsupportedError(
            "the positions of tokens are not consecutive, and they are not known on the host, so the mask of "
            "packed sequences was left out of this step. Put `position_ids` into the batch, or pass an "
            "attention mask."
        )


def _ignore_causal(original: Callable[..., bool], padding_mask: Any, q: int, kv: int, *args: Any) -> bool:
    answer = getattr(padding_mask, _ANSWER, None)
    if answer is None or not padding_mask.shape[-1] == q == kv:
        return original(padding_mask, q, kv, *args)
    return answer and original(None, q, kv, *args)


def _ignore_bidirectional(original: Callable[..., bool], padding_mask: Any, kv: int, *args: Any) -> bool:
    answer = getattr(padding_mask, _ANSWER, None)
    if answer is None or padding_mask.shape[-1] != kv:
        return original(padding_mask, kv, *args)
    return answer and original(None, kv, *args)


def _whole(mask: torch.Tensor) -> torch.Tensor:
    """The tensor that this one is a reshaped view of, or the tensor itself."""
    base = mask._base
    return mask if base is None or base.numel() != mask.numel() else base


def _host_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The CPU tensor behind a lazy one, if nothing has to run for it. None inside a captured step.

    There it would be looked at in the recorded calls only.
    """
    handle = find_handle(tensor)
    return None if handle is None or observer.current() is not None else handle.tensor
