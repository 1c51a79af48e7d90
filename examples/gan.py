"""Train a generator and a discriminator, each with its own step, on eight clusters of points on a circle.

    python examples/gan.py [--quick]

The two steps share both networks. Each step is captured separately and reads the parameters that the other
step has written. Noise is drawn on the lazy device inside the steps, in eager's order, and each replay draws
new noise. The exit status is 1 if no more than half of the generated points lie near a cluster.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazystep

BATCH_SIZE = 128
NUM_CLUSTERS = 8


def make_network(num_in: int, num_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(num_in, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, num_out),
    ).to("lazy")


def centers() -> Tensor:
    angles = torch.arange(NUM_CLUSTERS) * (2 * math.pi / NUM_CLUSTERS)
    return 2 * torch.stack([angles.cos(), angles.sin()], dim=1)


def real_points() -> Tensor:
    """A batch of the data, on the CPU."""
    return centers()[torch.randint(NUM_CLUSTERS, (BATCH_SIZE,))] + 0.1 * torch.randn(BATCH_SIZE, 2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="1,000 steps of each instead of 4,000")
    num_steps = 1000 if parser.parse_args().quick else 4000

    torch.manual_seed(0)
    generator, discriminator = make_network(8, 2), make_network(2, 1)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))

    @lazystep.step
    def discriminator_step(real: Tensor) -> Tensor:
        with torch.no_grad():
            fake = generator(torch.randn(BATCH_SIZE, 8, device="lazy"))
        loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
        loss.backward()
        optimizer_d.step()
        optimizer_d.zero_grad()
        return loss

    @lazystep.step
    def generator_step() -> Tensor:
        loss = F.softplus(-discriminator(generator(torch.randn(BATCH_SIZE, 8, device="lazy")))).mean()
        loss.backward()
        optimizer_g.step()
        optimizer_g.zero_grad()
        optimizer_d.zero_grad()  # this step also makes gradients of the discriminator: discard them
        return loss

    for step in range(1, num_steps + 1):
        loss_d = discriminator_step(real_points())
        loss_g = generator_step()
        if step % (num_steps // 5) == 0:
            print(
                f"step {step:5d}  discriminator {loss_d.item():.3f}  generator {loss_g.item():.3f}",
                flush=True,
            )

    with torch.no_grad():
        points = generator(torch.randn(2000, 8, device="lazy")).cpu()
    distance, nearest = torch.cdist(points, centers()).min(dim=1)
    is_near = distance < 0.5
    num_clusters = len(nearest[is_near].unique())
    print(f"{is_near.float().mean():.2f} of the points near a cluster, {num_clusters} clusters")
    print(discriminator_step.explain())
    print(generator_step.explain())
    return 0 if is_near.float().mean() > 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
