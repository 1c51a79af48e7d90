"""Two ranks train the same model twice, plain and overlapped. Losses and parameters are equal bit for bit.

    torchrun --nproc-per-node 2 examples/ddp_overlap.py [--quick] [--steps 60] [--timeline timeline.json]

The loop is ordinary: an optimizer with two groups, a schedule, gradient accumulation under `no_sync`. One
line makes DDP update the parameters of each bucket while later buckets are still being reduced. `--timeline`
writes the events of each bucket on rank 0. Open the file in ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lazystep.overlap import OverlapHandle, overlap_optimizer


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(64, 256), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(256, 1))


def train(
    num_steps: int, overlapped: bool
) -> tuple[DistributedDataParallel, list[float], OverlapHandle | None]:
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.25)
    matrices = [p for p in ddp.parameters() if p.dim() > 1]
    vectors = [p for p in ddp.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    handle = overlap_optimizer(ddp, optimizer) if overlapped else None  # the one line
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(num_steps):
        for part in range(2):  # two batches per step; only the second backward reduces
            x = torch.randn(64, 64, generator=data)
            y = x.square().mean(1, keepdim=True)
            with ddp.no_sync() if part == 0 else contextlib.nullcontext():
                loss = (ddp(x) - y).square().mean() / 2
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(2 * loss.item())
    return ddp, losses, handle


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="6 steps")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--timeline", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = {}
    for name in ("plain", "overlapped"):
        start = time.perf_counter()
        runs[name] = train(6 if arguments.quick else arguments.steps, name == "overlapped")
        if dist.get_rank() == 0:
            losses = runs[name][1]
            print(
                f"{name:>10}: {time.perf_counter() - start:.1f} s, loss {losses[0]:.5f} -> {losses[-1]:.5f}"
            )
    plain, ours = (list(runs[name][0].parameters()) for name in ("plain", "overlapped"))
    difference = max((a - b).abs().max().item() for a, b in zip(plain, ours, strict=True))
    handle = runs["overlapped"][2]
    assert handle is not None
    if dist.get_rank() == 0:
        seen = handle.statistics
        print(f"largest difference between the parameters: {difference}")
        print(f"{seen.parameters_updated} updates inside backward, {seen.parameters_left} left to step()")
        if arguments.timeline:
            arguments.timeline.write_text(json.dumps(handle.timeline()))
            print(f"wrote {arguments.timeline}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
