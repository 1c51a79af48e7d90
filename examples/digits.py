"""Classify scikit-learn's digits on `device="lazy"`, with worker processes that augment the images.

    pip install 'lazystep[demo]'
    python examples/digits.py [--quick]

The workers are forked, and a forked child can't use lazy tensors because it has no executor thread. So the
dataset and the workers use CPU tensors, and each batch moves to the lazy device when it enters the step. The
exit status is 1 if 90 % of the held-out digits or fewer are recognized.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lazystep


class AugmentedDigits(Dataset[tuple[Tensor, int]]):
    """Each access to an image rotates it, shifts it and adds noise."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        angle = 0.15 * torch.randn(())
        turned = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
        where = torch.cat([turned, 0.15 * torch.randn(2, 1)], dim=1)
        grid = F.affine_grid(where[None], [1, 1, 8, 8], align_corners=False)
        image = F.grid_sample(self.images[index : index + 1], grid, align_corners=False)[0]
        return image + 0.05 * torch.randn_like(image), self.labels[index]


def make_model() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 10))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of recognized images. It is read once, at the end."""
    model.eval()
    is_right = model(images.to("lazy")).argmax(1) == labels.to("lazy")
    model.train()
    return is_right.float().mean().item()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="6 epochs instead of 25")
    parser.add_argument("--workers", type=int, default=2, help="processes that augment (default: 2)")
    arguments = parser.parse_args()
    num_epochs = 6 if arguments.quick else 25

    torch.manual_seed(0)
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    labels = torch.from_numpy(data.target)
    # Without the smaller last batch, all batches have one shape and so one program.
    training = AugmentedDigits(images[:1400], labels[:1400])
    loader = DataLoader(training, 50, shuffle=True, num_workers=arguments.workers, drop_last=True)

    model = make_model().to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, num_epochs * len(loader))

    @lazystep.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    start = time.monotonic()
    for epoch in range(1, num_epochs + 1):
        losses = []
        for x, y in loader:  # CPU tensors from a worker: the step moves them
            losses.append(train_step(x, y))
            schedule.step()
        mean = torch.stack(losses).mean().item()  # the only read in an epoch
        print(f"epoch {epoch:2d}  loss {mean:.3f}  {time.monotonic() - start:4.0f} s", flush=True)

    right = accuracy(model, images[1400:], labels[1400:])
    print(f"held-out accuracy {right:.3f}")
    print(train_step.explain())
    return 0 if right > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
