"""Classify scikit-learn's digits with Lightning on `device="lazy"`, in captured steps.

    pip install 'lazystep[demo,integrations]'
    python examples/lightning_digits.py [--quick] [--directory runs/lightning]

The trainer validates after each epoch, stops early, keeps the best checkpoint and logs to TensorBoard. No
step waits for a value. Then the best checkpoint is loaded and tested. The exit status is 1 if 90 % of the
held-out digits or fewer are recognized.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lazystep
from lazystep.integrations.lightning import LazyStrategy

Batch = tuple[Tensor, Tensor]


class Digits(lightning.LightningModule):
    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.net = nn.Sequential(
            *(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Dropout(0.2),
                nn.Linear(256, 64),
                nn.ReLU(),
                nn.Linear(64, 10),
            ),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("accuracy", self.accuracy(batch), prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("held-out accuracy", self.accuracy(batch))

    def accuracy(self, batch: Batch) -> Tensor:
        images, labels = batch
        return (self.net(images).argmax(1) == labels).float().mean()

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, self.num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 epochs instead of 10")
    parser.add_argument("--directory", type=Path, default=Path("runs/lightning"))
    arguments = parser.parse_args()
    num_epochs = 5 if arguments.quick else 10
    warnings.filterwarnings("ignore", ".*does not have many workers")  # the data is in memory
    warnings.filterwarnings("ignore", ".*smaller than the logging interval")

    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target)
    # Without the smaller last batch, all batches have one shape and so one capture.
    training = DataLoader(TensorDataset(images[:1200], labels[:1200]), 50, shuffle=True, drop_last=True)
    validation = DataLoader(TensorDataset(images[1200:1400], labels[1200:1400]), 50)
    held_out = DataLoader(TensorDataset(images[1400:], labels[1400:]), 50)

    strategy = LazyStrategy(capture=True)
    best = ModelCheckpoint(
        arguments.directory, "best", monitor="accuracy", mode="max", enable_version_counter=False
    )
    trainer = lightning.Trainer(
        strategy=strategy,
        max_epochs=num_epochs,
        gradient_clip_val=1.0,
        callbacks=[best, EarlyStopping("accuracy", mode="max", patience=10)],
        logger=TensorBoardLogger(arguments.directory, name="digits"),
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
    )
    module = Digits(num_epochs * len(training))
    trainer.fit(module, training, validation)
    num_waits = lazystep.metrics.counter_value("synchronizations")
    print(f"{trainer.global_step} steps, {num_waits / trainer.current_epoch:.0f} waits an epoch")
    if strategy.captured_step is not None:
        print(strategy.captured_step.explain().splitlines()[0])

    (tested,) = trainer.test(module, held_out, ckpt_path=best.best_model_path, verbose=False)
    print(f"held-out accuracy {tested['held-out accuracy']:.3f}")
    return 0 if tested["held-out accuracy"] > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
