"""Train a byte-level GPT-2 with Hugging Face's Trainer on `device="lazy"`, in captured steps.

    pip install 'lazystep[demo,integrations]'
    python examples/hf_trainer.py [--quick] [--directory runs/hf_trainer]

The text is the source of some modules of Python's standard library, so nothing is downloaded. The Trainer
evaluates and saves a checkpoint in the middle. A second Trainer resumes from it, and both end with the same
parameters: bit for bit with LAZYSTEP_TIER=reference, else as close as native steps are. The exit status is 1
if the model does not learn.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

import lazystep
from lazystep.integrations.transformers import LazyTrainer, LazyTrainingArguments
from lazystep.report import JsonlLog

LENGTH = 32


def pieces() -> list[dict[str, torch.Tensor]]:
    text = "".join(inspect.getsource(module) for module in (argparse, ast, inspect)).encode()
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = rows[: len(rows) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def make(directory: Path, num_steps: int, report: Any = None) -> LazyTrainer:
    set_seed(0)
    size = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 48, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    rows = pieces()
    arguments = LazyTrainingArguments(
        output_dir=str(directory),
        capture=True,  # forward, backward, clipping and update are one captured step
        max_steps=num_steps,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=num_steps // 2,
        save_steps=num_steps // 2,
        logging_steps=num_steps // 4,  # each log waits for two values
        report_to=[],
        disable_tqdm=True,
    )
    return LazyTrainer(
        model=model, args=arguments, train_dataset=rows[:-64], eval_dataset=rows[-64:], report=report
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="80 steps instead of 200")
    parser.add_argument("--directory", type=Path, default=Path("runs/hf_trainer"))
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    num_steps = 80 if arguments.quick else 200

    with JsonlLog(arguments.directory / "log.jsonl") as log:  # the loss of each step, without a wait
        first = make(arguments.directory, num_steps, log)
        first.train()
    assert first.captured_step is not None
    print(first.captured_step.explain().splitlines()[0])

    second = make(arguments.directory / "resumed", num_steps)
    second.train(resume_from_checkpoint=str(arguments.directory / f"checkpoint-{num_steps // 2}"))
    trained = [lazystep.to_cpu(list(trainer.model.parameters())) for trainer in (first, second)]
    difference = max((a - b).abs().max().item() for a, b in zip(*trained, strict=True))
    print(f"largest difference after resuming {difference:.2g}")

    losses = [entry["eval_loss"] for entry in first.state.log_history if "eval_loss" in entry]
    print(f"held-out loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte")
    return 0 if losses[-1] < losses[0] < 4.0 else 1


if __name__ == "__main__":
    sys.exit(main())
