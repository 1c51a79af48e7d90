"""A small encoder of Transformers and padded batches for it, for trainers of other packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, masking_utils

from lazystep.integrations import masks


def make_encoder() -> Any:
    """A classifier with dropout."""
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=3, **size))


def make_loader() -> Any:
    """Twenty batches; every second one is padded."""
    ids = torch.randint(1, 40, (80, 8))
    mask = torch.ones_like(ids)
    mask[4::8, 5:] = 0
    rows = [
        {"input_ids": one, "attention_mask": seen, "labels": one[0] % 3}
        for one, seen in zip(ids, mask, strict=True)
    ]
    return torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def forget_masks(patch: pytest.MonkeyPatch) -> None:
    """Have Transformers as a process has it that has not imported its integration."""
    masks.install()
    for name in ("_preprocess_mask_arguments", "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        original: Any = getattr(masking_utils, name)
        patch.setattr(masking_utils, name, original._lazystep_original)
