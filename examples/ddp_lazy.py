"""Two ranks train a model with torch's DDP on the CPU and on the lazy device.

The results are equal bit for bit on the reference executable (LAZYSTEP_TIER=reference). A longer run, or one
that finds the step's library on disk, is native: equal up to rounding.

    torchrun --nproc-per-node 2 examples/ddp_lazy.py [--quick] [--steps 60] [--timeline timeline.json]

The function `train` is written once. On the lazy device the whole step of a rank is one program: forward,
backward, the reduction of each bucket and its update. From the fourth step on it is replayed. `--timeline`
writes what ran when on rank 0. Open the file in ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lazystep


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(64, 256), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(256, 1))


def train(device: str, num_steps: int) -> tuple[nn.Module, list[float]]:
    ddp = DistributedDataParallel(make_model().to(device), bucket_cap_mb=0.25)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = (ddp(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = lazystep.step(step) if device == "lazy" else step
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(num_steps):
        x = torch.randn(64, 64, generator=data)
        losses.append(run(x, x.square().mean(1, keepdim=True)))
        schedule.step()
    if isinstance(run, lazystep.Step) and dist.get_rank() == 0:
        print(run.explain().splitlines()[0])
    return ddp, [loss.item() for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="12 steps")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--timeline", type=Path)
    arguments = parser.parse_args()
    num_steps = 12 if arguments.quick else arguments.steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    plain, plain_losses = train("cpu", num_steps)
    start = time.perf_counter()
    recording = arguments.timeline and is_first
    with lazystep.profile(arguments.timeline) if recording else contextlib.nullcontext():
        lazy, losses = train("lazy", num_steps)
    if is_first:
        print(f"loss {losses[0]:.5f} -> {losses[-1]:.5f} in {time.perf_counter() - start:.1f} s")
        pairs = zip(plain.parameters(), lazy.parameters(), strict=True)
        difference = max((a - b.cpu()).abs().max().item() for a, b in pairs)
        print(f"losses are equal: {losses == plain_losses}, largest difference of parameters: {difference}")
    lazystep.wait_device_ops()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
