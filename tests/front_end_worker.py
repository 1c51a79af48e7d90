"""Records what it is told and prints the programs: one JSON line in, one out. Run with either front end.

echo '{"model": "mlp"}' | LAZYSTEP_RECORDER=native python tests/front_end_worker.py
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch

import lazystep
from benchmarks import models
from lazystep.record.device import IS_NATIVE
from tests.record import test_random_programs as random_programs

OPS: list[Any] = [*random_programs.UNARY, *random_programs.IN_PLACE]
OPS += [*random_programs.VIEWS, *random_programs.METADATA, *random_programs.BINARY]


def programs_of_model(name: str, num_steps: int = 3) -> list[str]:
    """The programs of some training steps, as text."""
    torch.manual_seed(0)
    model, make_batch, loss_fn = models.MODELS[name]()
    model.to("lazy")
    optimizer = models.make_optimizer(model)
    texts = []
    for _ in range(num_steps):
        x, y = make_batch()
        loss_fn(model(x.to("lazy")), y.to("lazy")).backward()
        optimizer.step()
        optimizer.zero_grad()
        lazystep.mark_step()
        texts.append(str(lazystep.debug.last_program()))
    return texts


def programs_of_ops(choices: list[tuple[int, int, int]]) -> list[str]:
    """The programs of a sequence of ops, without what eager refuses. A number past the list ends a step."""
    torch.manual_seed(0)
    tensors = [torch.arange(12.0).reshape(3, 4).to("lazy"), torch.ones(4).to("lazy")]
    texts = []
    for number, first, second in choices:
        if number >= len(OPS):
            lazystep.mark_step()
            texts.append(str(lazystep.debug.last_program()))
            continue
        op = OPS[number]
        operands = [tensors[first % len(tensors)], tensors[second % len(tensors)]]
        try:
            tensors.append(op(*operands) if op in random_programs.BINARY else op(operands[0]))
        except (RuntimeError, IndexError) as error:
            texts.append(f"refused: {type(error).__name__}")
        if len(tensors) > 8:
            del tensors[first % len(tensors)]
    gc.collect()
    lazystep.mark_step()
    return [*texts, str(lazystep.debug.last_program()), *(str(t.tolist()) for t in tensors)]


def main() -> None:
    print(json.dumps({"native": IS_NATIVE}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        texts = programs_of_model(task["model"]) if "model" in task else programs_of_ops(task["ops"])
        print(json.dumps(texts), flush=True)


if __name__ == "__main__":
    main()
