"""Train scikit-learn's digits with Hugging Face Accelerate on `device="lazy"`, and resume from a saved state.

    pip install 'lazystep[demo,integrations]'
    python examples/accelerate_loop.py [--quick] [--directory runs/accelerate]

The loop is Accelerate's own, with accumulation, clipping, a schedule and TensorBoard. Only the `Accelerator`
is another one. After half of the epochs the state is saved. A second training loads it and goes on. Both end
with the same parameters: bit for bit with LAZYSTEP_TIER=reference, else as close as native steps are. The
exit status is 1 if 90 % of the held-out digits or fewer are recognized.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import ProjectConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lazystep
from lazystep.integrations.accelerate import Accelerator


class Training:
    def __init__(self, directory: Path, num_epochs: int) -> None:
        self.accelerator = Accelerator(
            gradient_accumulation_steps=2,
            log_with="tensorboard",
            project_config=ProjectConfiguration(str(directory), logging_dir=str(directory)),
        )
        set_seed(0)
        digits = load_digits()
        images, labels = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target)
        loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), 50, shuffle=True)
        held_out = DataLoader(TensorDataset(images[1400:], labels[1400:]), 50)
        model = nn.Sequential(
            *(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * len(loader) // 2)
        self.model, self.optimizer, self.schedule, self.loader, self.held_out = self.accelerator.prepare(
            model, optimizer, schedule, loader, held_out
        )
        self.num_steps = 0

    def epoch(self) -> None:
        for images, labels in self.loader:  # on the lazy device; the loader ends each step
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(images), labels)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.num_steps += 1
            self.accelerator.log({"loss": loss}, step=self.num_steps)  # a closure: no wait

    @torch.no_grad()
    def accuracy(self) -> float:
        self.model.eval()
        is_right = [self.model(images).argmax(1) == labels for images, labels in self.held_out]
        self.model.train()
        return torch.cat(is_right).float().mean().item()

    def parameters(self) -> list[Tensor]:
        return lazystep.to_cpu(list(self.model.parameters()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="12 epochs instead of 16")
    parser.add_argument("--directory", type=Path, default=Path("runs/accelerate"))
    arguments = parser.parse_args()
    num_epochs = 12 if arguments.quick else 16
    state = arguments.directory / "state"

    first = Training(arguments.directory, num_epochs)
    first.accelerator.init_trackers("digits")
    for epoch in range(num_epochs):
        if epoch == num_epochs // 2:
            first.accelerator.save_state(str(state))
            num_waits = lazystep.metrics.counter_value("synchronizations")
        first.epoch()
    num_waits = lazystep.metrics.counter_value("synchronizations") - num_waits
    first.accelerator.end_training()
    print(f"{first.num_steps} steps, {num_waits} waits for a value after the checkpoint")

    second = Training(arguments.directory, num_epochs)
    second.accelerator.load_state(str(state))
    for _ in range(num_epochs - num_epochs // 2):
        second.epoch()
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    print(f"largest difference after resuming {max((a - b).abs().max().item() for a, b in pairs):.2g}")

    accuracy = second.accuracy()
    print(f"held-out accuracy {accuracy:.3f}")
    return 0 if accuracy > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
