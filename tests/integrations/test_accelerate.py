"""Accelerate's own loop on the lazy device and on the CPU: equal to the bit, resumed, captured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import lazystep
from lazystep.integrations import masks
from lazystep.integrations.accelerate import Accelerator
from lazystep.report import JsonlLog
from tests.helpers import count
from tests.integrations.encoder import forget_masks, make_encoder, make_loader
from tests.integrations.examples import run_example
from tests.integrations.reports import Reports


def forget_state() -> None:
    """Accelerate keeps the device in a state of the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    forget_state()
    yield
    forget_state()


class Training:
    """A loop as in Accelerate's documentation, with accumulation, clipping and a schedule."""

    def __init__(self, kind: Any, is_captured: bool = False, **options: Any) -> None:
        forget_state()
        torch.manual_seed(0)
        # An order of batches that can be resumed in the middle of an epoch.
        loading = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator = kind(gradient_accumulation_steps=2, dataloader_config=loading, **options)
        x = torch.randn(80, 6)
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
        model[3].twin = model[3].weight  # tied: one parameter under two names
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 7)
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        self.model, self.opt, self.loader, self.schedule = self.accelerator.prepare(
            model, opt, loader, schedule
        )
        self.losses: list[torch.Tensor] = []
        self.step = lazystep.step(self.run_step) if is_captured else self.run_step

    def run_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (self.model(x) - y).square().mean()
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()

    def epoch(self, loader: Any = None, after: Callable[[int, torch.Tensor], None] | None = None) -> None:
        for number, (x, y) in enumerate(self.loader if loader is None else loader):
            with self.accelerator.accumulate(self.model):
                self.losses.append(self.step(x, y))
                self.schedule.step()
            if after is not None:
                after(number, self.losses[-1])

    def numbers(self) -> list[torch.Tensor]:
        state = [t for s in self.opt.state.values() for t in s.values()]
        return [t.detach().cpu() for t in [*self.losses, *self.model.state_dict().values(), *state]]


def train_on_cpu(**options: Any) -> list[torch.Tensor]:
    training = Training(accelerate.Accelerator, cpu=True, **options)
    for _ in range(3):
        training.epoch()
    return training.numbers()


class ScalingOnCpu(accelerate.Accelerator):
    """Accelerate itself makes no scaler for the CPU, and does not cast there."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cpu=True, **options)
        self.scaler = torch.amp.GradScaler("cpu", **self.scaler_handler.to_kwargs())
        self.native_amp = True


def test_float16_with_overflows_equals_the_cpu() -> None:
    handler = accelerate.GradScalerKwargs(init_scale=2.0**24, growth_interval=4)
    found = []
    for kind in (ScalingOnCpu, Accelerator):
        training = Training(kind, mixed_precision="fp16", kwargs_handlers=[handler])
        lazystep.metrics.reset()
        skipped = []
        for _ in range(2):
            training.epoch()
            skipped.append(training.opt.step_was_skipped)
        # Accelerate asks after each update whether it was skipped: a schedule does not count such a step.
        waits = count("synchronizations")
        found.append((skipped, training.schedule.state_dict(), training.accelerator.scaler.state_dict()))
        found[-1] += (training.numbers(),)
    assert training.accelerator.device.type == "lazy"
    assert waits == 20
    *want, numbers = found[0]
    *got, lazy_numbers = found[1]
    assert got == want
    assert want[2]["scale"] < 2.0**24, "no step has overflowed"
    assert all(map(torch.equal, lazy_numbers, numbers))


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}], ids=["float32", "bf16"])
@pytest.mark.parametrize("is_captured", [False, True], ids=["recorded", "captured"])
def test_sixty_steps_equal_the_cpu_without_a_wait(is_captured: bool, options: dict[str, Any]) -> None:
    eager = train_on_cpu(**options)
    lazy = Training(Accelerator, is_captured, **options)
    lazystep.metrics.reset()
    for _ in range(3):
        lazy.epoch()
    assert count("synchronizations") == 0, lazystep.metrics.report()
    assert lazy.accelerator.device.type == "lazy"
    assert lazy.model[0].weight.device.type == "lazy"
    assert len(lazy.losses) == 60
    if isinstance(lazy.step, lazystep.Step):
        # With an update and without: two captures, each with its early audits.
        assert lazy.step.num_replayed >= 40, lazy.step.explain()
    else:
        assert count("programs_recorded") == 60
    assert all(map(torch.equal, lazy.numbers(), eager))


@pytest.mark.parametrize("is_captured", [False, True], ids=["recorded", "captured"])
def test_state_saved_after_an_epoch_resumes_to_the_bit(is_captured: bool, tmp_path: Path) -> None:
    eager = train_on_cpu()
    lazy = Training(Accelerator, is_captured)
    lazy.epoch()
    lazystep.metrics.reset()
    lazy.accelerator.save_state(str(tmp_path))
    # The parameters of the model, and two moments for each of them.
    assert count("synchronizations") <= 12, lazystep.metrics.report()
    assert (tmp_path / "model.safetensors").exists()
    resumed = Training(Accelerator, is_captured)
    torch.manual_seed(77)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.loader.set_epoch(1)
    lazystep.metrics.reset()
    resumed.epoch()
    resumed.epoch()
    assert count("synchronizations") == 0, lazystep.metrics.report()
    assert all(map(torch.equal, resumed.numbers(), eager[20:]))


def test_state_saved_in_mid_epoch_resumes_here_as_on_the_cpu(tmp_path: Path) -> None:
    # Accelerate itself does not continue the stream of random numbers there: each new loader draws a seed.
    lazy = Training(Accelerator)
    lazy.epoch(after=lambda number, loss: lazy.accelerator.save_state(str(tmp_path)) if number == 9 else None)
    resumed = []
    for kind, options in ((accelerate.Accelerator, {"cpu": True}), (Accelerator, {})):
        training = Training(kind, **options)
        training.accelerator.load_state(str(tmp_path))
        lazystep.metrics.reset()
        training.epoch(training.accelerator.skip_first_batches(training.loader, 10))
        resumed.append(training)
    assert count("programs_recorded") == 10  # barriers in the shortened loader, too
    assert len(resumed[0].losses) == 10
    assert all(map(torch.equal, resumed[0].numbers(), resumed[1].numbers()))


def test_model_with_tied_weights_is_saved_and_loaded(tmp_path: Path) -> None:
    training = Training(Accelerator)
    training.epoch()
    training.accelerator.save_model(training.model, str(tmp_path))
    other = Training(accelerate.Accelerator, cpu=True)
    accelerate.load_checkpoint_in_model(other.model, str(tmp_path))
    assert other.model[3].twin is other.model[3].weight
    for mine, saved in zip(training.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine.cpu(), saved)


def train_encoder(accelerator: Any, is_captured: bool) -> tuple[list[torch.Tensor], Any]:
    """The loop of Accelerate's `nlp_example.py`: training, evaluation and `gather_for_metrics`."""
    torch.manual_seed(3)
    model = make_encoder().to(accelerator.device)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 5)
    model, opt, loader, held_out, schedule = accelerator.prepare(
        model, opt, make_loader(), make_loader(), schedule
    )

    def run_step(batch: Any, answers: Any) -> torch.Tensor:
        loss = model(**masks.told(batch, answers)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    step: Any = lazystep.step(run_step) if is_captured else run_step
    seen: list[torch.Tensor] = []
    lazystep.metrics.reset()
    for _ in range(2):
        model.train()
        for batch in loader:
            seen.append(step(batch, masks.answers_of(batch) if is_captured else ()))
            schedule.step()
        model.eval()
        for batch in held_out:
            with torch.no_grad():
                guesses = model(**batch).logits.argmax(-1)
            seen += accelerator.gather_for_metrics((guesses, batch["labels"]))
    assert count("synchronizations") == 0, lazystep.metrics.report()
    return [t.detach().cpu() for t in [*seen, *model.state_dict().values()]], step


@pytest.mark.parametrize("is_captured", [False, True], ids=["recorded", "captured"])
def test_model_of_transformers_with_padded_batches_equals_the_cpu_without_a_wait(
    is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_masks(monkeypatch)
    expected, _ = train_encoder(accelerate.Accelerator(cpu=True), False)
    forget_state()
    found, step = train_encoder(Accelerator(), is_captured)
    assert all(map(torch.equal, found, expected))
    if is_captured:  # with padding and without: two captures
        assert step.num_replayed >= 20, step.explain()


def test_trackers_and_reports_get_the_values_of_each_step_without_a_wait(tmp_path: Path) -> None:
    training = Training(Accelerator, log_with="tensorboard", project_dir=str(tmp_path))
    training.accelerator.init_trackers("run")
    lazystep.metrics.reset()
    with JsonlLog(tmp_path / "log.jsonl") as log:

        def report(number: int, loss: torch.Tensor) -> None:
            log(number, loss=loss)
            training.accelerator.log({"loss": loss, "both": {"loss": loss}, "rate": 0.5}, step=number)

        training.epoch(after=report)
        assert count("synchronizations") == 0, lazystep.metrics.report()
    training.accelerator.end_training()
    expected = [loss.item() for loss in training.losses]
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == expected
    board = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(expected, rel=1e-6)
    assert [event.step for event in board.Scalars("rate")] == list(range(20))


@pytest.mark.parametrize("is_captured", [False, True], ids=["recorded", "captured"])
def test_all_reports_at_once_cost_no_wait(
    is_captured: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(Accelerator, is_captured)
    reports = Reports(tmp_path, 20)
    lazystep.metrics.reset()
    training.epoch(after=lambda number, loss: reports(number, loss=loss))
    assert count("synchronizations") == 0, lazystep.metrics.report()
    lazystep.flush_step_closures()
    reports.check(list(range(20)), [loss.item() for loss in training.losses], printed=capsys.readouterr().out)


def test_a_tracker_that_fails_is_an_error_at_the_end_of_the_training(tmp_path: Path) -> None:
    class Broken(accelerate.tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "broken", False, None

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            raise OSError("no space left")

    training = Training(Accelerator, log_with=Broken())
    training.accelerator.init_trackers("run")
    training.accelerator.log({"loss": torch.ones((), device="lazy")})
    with pytest.raises(lazystep.ClosureError, match="no space left"):
        training.accelerator.end_training()


def test_state_that_only_has_a_device_is_moved() -> None:
    assert PartialState(cpu=True).device.type == "cpu"
    assert Accelerator().device.type == "lazy"
    assert Accelerator().device.type == "lazy"  # and a second one is on the same device


def test_wrong_use_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"cpu=True.*leave `cpu` out"):
        Accelerator(cpu=True)
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(lazystep.UnsupportedError, match=r"fsdp_plugin in 2 processes.*Leave it out"):
            Accelerator(fsdp_plugin=accelerate.FullyShardedDataParallelPlugin())
        with patch.context() as inner:
            inner.setenv("ACCELERATE_USE_DEEPSPEED", "true")
            with pytest.raises(lazystep.UnsupportedError, match="ACCELERATE_USE_DEEPSPEED in 2 processes"):
                Accelerator()
        assert not PartialState._shared_state  # nothing was made before it was refused
        PartialState()
        with pytest.raises(ValueError, match=r"one of 2, but .* made before for 1.*before anything else"):
            Accelerator()
    PartialState._reset_state()
    accelerate.Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"an Accelerator on cpu.*_reset_state"):
        Accelerator()


def test_example_learns_and_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_example("accelerate_loop", monkeypatch, "--directory", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "336 steps, 0 waits" in printed
    assert "largest difference after resuming 0\n" in printed
    assert (tmp_path / "digits").is_dir()
