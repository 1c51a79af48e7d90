"""The integrations in two processes, with gloo: equal to the same framework on the CPU, to the bit."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from tests.pool import Pool, World


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


@contextmanager
def started_by_torchrun(world: World) -> Iterator[None]:
    """The environment of a process that torchrun has started. The process group is the pool's."""
    before = dict(os.environ)
    rank, size = str(world.rank), str(world.size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, OMP_NUM_THREADS="1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the frameworks, as in one process
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def make_data() -> Any:
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))


def on_the_cpu(tensors: Any) -> list[torch.Tensor]:
    return [tensor.detach().cpu() for tensor in tensors]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert len(got["tensors"]) == len(want["tensors"]) > 30
        assert all(map(torch.equal, got["tensors"], want["tensors"]))


def accelerate_on(world: World, device: str, directory: str) -> dict[str, Any]:
    import accelerate
    from accelerate.state import AcceleratorState

    from lazystep.integrations.accelerate import Accelerator

    with started_by_torchrun(world):
        AcceleratorState._reset_state(True)
        options: dict[str, Any] = {"gradient_accumulation_steps": 2}
        if device == "cpu":
            accelerator = accelerate.Accelerator(cpu=True, **options)
        else:
            accelerator = Accelerator(**options)
        assert accelerator.num_processes == 2
        accelerate.utils.set_seed(1)
        model = make_model()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 10, 0.5)
        loader = torch.utils.data.DataLoader(make_data(), batch_size=4, shuffle=True)
        model, opt, schedule, loader = accelerator.prepare(model, opt, schedule, loader)
        losses: list[torch.Tensor] = []
        lazystep.metrics.reset()
        waits = -1
        for epoch in range(4):  # the last one from the state that was saved before the third
            if epoch == 2:
                waits = lazystep.metrics.counter_value("synchronizations")
                accelerator.save_state(directory)
            elif epoch == 3:
                accelerator.load_state(directory)
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = (model(x) - y).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    opt.step()
                    schedule.step()
                    opt.zero_grad()
                losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)))
        return {
            "tensors": on_the_cpu([*losses, *model.state_dict().values()]),
            "model": f"{type(model).__module__}.{type(model).__name__}",
            "waits": waits,
        }


def test_accelerate_in_two_processes_equals_the_cpu(pool: Pool, tmp_path: Path) -> None:
    expected, found = (
        pool.run(accelerate_on, device, str(tmp_path / device), timeout=200) for device in ("cpu", "lazy")
    )
    assert_equal(found, expected)
    assert found[0]["model"] == "lazystep.distributed.data_parallel.DistributedDataParallel"
    assert [told["waits"] for told in found] == [0, 0]


def transformers_on(world: World, device: str, capture: bool, directory: str) -> dict[str, Any]:
    import transformers

    from lazystep.integrations.transformers import LazyTrainer, LazyTrainingArguments

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    size = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0)
    rows = torch.randint(0, 64, (70, 16), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in rows]
    options: dict[str, Any] = {
        "output_dir": directory,
        "max_steps": 20,
        "logging_steps": 5,
        "save_steps": 10,
        "eval_steps": 10,
        "eval_strategy": "steps",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "ddp_find_unused_parameters": False,
        "report_to": [],
        "disable_tqdm": True,
    }
    with started_by_torchrun(world):
        tensors: list[torch.Tensor] = []
        logs: list[Any] = []
        replayed = 0
        for resume in (None, f"{directory}/checkpoint-10"):
            transformers.set_seed(1)
            model = transformers.GPT2LMHeadModel(config)
            kind = transformers.Trainer if device == "cpu" else LazyTrainer
            args = (
                transformers.TrainingArguments(**options, use_cpu=True)
                if device == "cpu"
                else LazyTrainingArguments(**options, capture=capture)
            )
            trainer = kind(model=model, args=args, train_dataset=data, eval_dataset=data[:11])
            trainer.remove_callback(transformers.PrinterCallback)
            assert trainer.args.world_size == 2
            trainer.train(resume_from_checkpoint=resume)
            tensors += model.state_dict().values()
            kept = ("loss", "grad_norm", "eval_loss", "learning_rate", "step")
            logs += [{name: log[name] for name in kept if name in log} for log in trainer.state.log_history]
            step = getattr(trainer, "captured_step", None)
            replayed += 0 if step is None else step.num_replayed
        return {"tensors": on_the_cpu(tensors), "logs": logs, "replayed": replayed}


@pytest.mark.parametrize("capture", [False, True], ids=["recorded", "captured"])
def test_trainer_in_two_processes_equals_the_cpu(capture: bool, pool: Pool, tmp_path: Path) -> None:
    expected, found = (
        pool.run(transformers_on, device, capture, str(tmp_path / device), timeout=250)
        for device in ("cpu", "lazy")
    )
    assert_equal(found, expected)
    assert found[0]["logs"] == expected[0]["logs"]
    assert len(found[0]["logs"]) >= 10
    if capture:
        assert found[0]["replayed"] >= 20, "of 60 calls in two trainings"


def lightning_on(world: World, device: str, capture: bool, directory: str) -> dict[str, Any]:
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from lazystep.integrations.lightning import LazyDDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.losses.append(outputs["loss"])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("held_out", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    strategy = LazyDDPStrategy(capture=capture)
    options: dict[str, Any] = {"strategy": strategy}
    if device == "cpu":
        options = {"strategy": DDPStrategy(process_group_backend="gloo"), "accelerator": "cpu"}
    with started_by_torchrun(world):
        lightning.seed_everything(1, verbose=False)
        module = Module()
        loader = torch.utils.data.DataLoader(make_data(), batch_size=4)
        trainer = lightning.Trainer(
            **options,
            devices=2,
            max_epochs=4,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            callbacks=[EarlyStopping("held_out", patience=9), ModelCheckpoint(directory, save_top_k=-1)],
            default_root_dir=tempfile.gettempdir(),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader, loader)
        metrics = [trainer.callback_metrics[name] for name in sorted(trainer.callback_metrics)]
        step = strategy.captured_step
        return {
            "tensors": on_the_cpu([*module.losses, *module.state_dict().values(), *metrics]),
            "replayed": 0 if step is None else step.num_replayed,
            "why": "" if step is None else step.explain(),
        }


@pytest.mark.parametrize("capture", [False, True], ids=["recorded", "captured"])
def test_lightning_in_two_processes_equals_the_cpu(capture: bool, pool: Pool, tmp_path: Path) -> None:
    expected, found = (
        pool.run(lightning_on, device, capture, str(tmp_path / device), timeout=250)
        for device in ("cpu", "lazy")
    )
    assert_equal(found, expected)
    files = [sorted(path.name for path in (tmp_path / device).glob("*.ckpt")) for device in ("cpu", "lazy")]
    assert len(files[0]) == 4
    assert files[0] == files[1]
    if capture:
        assert found[0]["replayed"] >= 15, found[0]["why"]
