"""Lightning's Trainer on the lazy device and on the CPU: equal to the bit, resumed, captured."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

import lazystep
from lazystep.integrations.lightning import LazyAccelerator, LazyStrategy
from tests.helpers import count
from tests.integrations import encoder
from tests.integrations.examples import counts_in, run_example
from tests.integrations.reports import Reports

pytestmark = [  # what Lightning says of such small trainings, on every device
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]
FORMS = pytest.mark.parametrize("capture", [False, True], ids=["recorded", "captured"])


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1)
        )
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, index: int) -> dict[str, torch.Tensor]:
        x, y = batch
        error = self.net(x) - y
        loss = error.square().mean()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("largest", error.abs().max(), reduce_fx="max", on_epoch=True, on_step=False)
        return {"loss": loss, "error": error}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(outputs["loss"])

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("held_out", (self.net(x) - y).square().mean(), prog_bar=True)

    def test_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("tested", (self.net(x) - y).abs().mean())

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        opt = torch.optim.AdamW(self.parameters(), lr=0.02)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)}


def make_loader() -> Any:
    x = torch.randn(80, 6)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return torch.utils.data.DataLoader(data, batch_size=4)


def train(
    path: Path,
    *callbacks: Any,
    num_epochs: int = 3,
    kind: type[Module] = Module,
    resume: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    lightning.seed_everything(1, verbose=False)
    loader, module = make_loader(), kind()
    common: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 0.5,
    }
    trainer = lightning.Trainer(
        max_epochs=num_epochs,
        callbacks=[EarlyStopping("held_out", patience=9), *callbacks],
        default_root_dir=path,
        **{**common, **options},
    )
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return module, trainer


def numbers(module: Module, trainer: Any) -> list[torch.Tensor]:
    state = [t for opt in trainer.optimizers for s in opt.state.values() for t in s.values()]
    shown = [trainer.callback_metrics[name] for name in sorted(trainer.callback_metrics)]
    return [t.detach().cpu() for t in [*module.losses, *module.state_dict().values(), *state, *shown]]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed", "num_epochs": 1},
    "clipped by value": {"gradient_clip_algorithm": "value", "num_epochs": 1},
}


@FORMS
@pytest.mark.parametrize("case", CASES)
def test_sixty_steps_with_validation_and_early_stopping_equal_the_cpu(
    case: str, capture: bool, tmp_path: Path
) -> None:
    eager = train(tmp_path, accelerator="cpu", **CASES[case], enable_checkpointing=False)
    strategy = LazyStrategy(capture=capture)
    lazy = train(tmp_path, strategy=strategy, **CASES[case], enable_checkpointing=False)
    assert strategy.root_device.type == "lazy"
    num_steps = 20 * CASES[case].get("num_epochs", 3)
    assert len(lazy[0].losses) == num_steps
    assert lazy[0].losses[0].device.type == "lazy"
    assert lazy[1].global_step == eager[1].global_step
    assert all(map(torch.equal, numbers(*lazy), numbers(*eager)))
    if capture:
        assert strategy.captured_step is not None
        assert strategy.captured_step.num_recorded + strategy.captured_step.num_replayed == num_steps
        assert strategy.captured_step.num_replayed >= num_steps // 2, strategy.captured_step.explain()


@pytest.mark.parametrize("is_default", [False, True], ids=["float32 by default", "its type by default"])
@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_whole_precisions_equal_the_cpu_and_are_replayed(
    precision: Any, dtype: torch.dtype, is_default: bool, tmp_path: Path
) -> None:
    """Lightning sets the default type around `training_step`, which would end the program."""
    found = []
    strategy = LazyStrategy(capture=True)
    torch.set_default_dtype(dtype if is_default else torch.float32)
    try:
        for device in ({"accelerator": "cpu"}, {"strategy": strategy}):
            trained = train(tmp_path, **device, precision=precision, enable_checkpointing=False, num_epochs=2)
            assert trained[0].net[0].weight.dtype is dtype
            assert torch.get_default_dtype() is (dtype if is_default else torch.float32)
            found.append(numbers(*trained))
    finally:
        torch.set_default_dtype(torch.float32)
    assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]
    assert all(map(torch.equal, *found))
    step = strategy.captured_step
    assert step is not None
    assert step.num_recorded + step.num_replayed == 40
    assert step.num_replayed >= 20, step.explain()


class WithHook(Module):
    """Makes a tensor of the default type after backward, where Lightning's default type does not hold."""

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.net[0].weight.grad += torch.rand(16, 6, device=self.device)


@pytest.mark.filterwarnings("ignore:.*_step is recorded in each call.*it ends a step")
def test_whole_precision_with_a_hook_equals_the_cpu_and_is_recorded(tmp_path: Path) -> None:
    strategy = LazyStrategy(capture=True)
    options: dict[str, Any] = {"precision": "64-true", "enable_checkpointing": False, "num_epochs": 1}
    eager = train(tmp_path, accelerator="cpu", kind=WithHook, **options)
    lazy = train(tmp_path, strategy=strategy, kind=WithHook, **options)
    assert all(map(torch.equal, numbers(*lazy), numbers(*eager)))
    assert strategy.captured_step is not None
    assert strategy.captured_step.num_replayed == 0
    assert "it ends a step at" in strategy.captured_step.explain()


class WithMetrics(Module):
    """Updates metrics of torchmetrics in the training step, as Lightning's documentation does."""

    def __init__(self) -> None:
        super().__init__()
        self.within = torchmetrics.classification.BinaryAccuracy(validate_args=False)
        self.mean = torchmetrics.MeanMetric(nan_strategy="disable")
        self.several = torchmetrics.MetricCollection(
            [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()]
        )
        self.seen: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        result = super().training_step(batch, index)
        near = torch.exp(-result["error"].detach().abs()).flatten()
        self.within(near, torch.ones_like(near, dtype=torch.int64))
        self.log("within", self.within, on_step=True, on_epoch=True)
        self.mean.update(result["loss"].detach())
        self.several.update(result["error"].detach(), torch.zeros_like(result["error"]))
        return result

    def on_train_epoch_end(self) -> None:
        self.seen.append([self.mean.compute(), *self.several.compute().values(), self.mean._update_count])
        self.mean.reset()
        self.several.reset()


@FORMS
def test_metrics_that_the_training_step_updates_equal_the_cpu(capture: bool, tmp_path: Path) -> None:
    eager = train(tmp_path, accelerator="cpu", kind=WithMetrics, enable_checkpointing=False)
    strategy = LazyStrategy(capture=capture)
    lazy = train(tmp_path, strategy=strategy, kind=WithMetrics, enable_checkpointing=False)
    assert all(map(torch.equal, numbers(*lazy), numbers(*eager)))
    found = [[float(value) for value in epoch] for epoch in lazy[0].seen]
    assert found == [[float(value) for value in epoch] for epoch in eager[0].seen]
    if capture:
        assert strategy.captured_step is not None
        assert strategy.captured_step.num_replayed >= 30, strategy.captured_step.explain()


class Encoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = encoder.make_encoder()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(outputs["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@FORMS
def test_model_of_transformers_with_padded_batches_equals_the_cpu(
    capture: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder.forget_masks(monkeypatch)
    strategy = LazyStrategy(capture=capture)
    found = []
    for device in ({"accelerator": "cpu"}, {"strategy": strategy}):
        lightning.seed_everything(1, verbose=False)
        loader, module = encoder.make_loader(), Encoder()
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = lightning.Trainer(max_epochs=2, enable_checkpointing=False, **device, **quiet)
        lazystep.metrics.reset()
        trainer.fit(module, loader)
        waits = [wait for wait in lazystep.metrics.synchronizations() if "masking_utils" in wait[1]]
        found.append([t.detach().cpu() for t in [*module.losses, *module.state_dict().values()]])
    assert waits == []
    assert all(map(torch.equal, *found))
    if capture:
        assert strategy.captured_step is not None
        assert strategy.captured_step.num_replayed >= 20, strategy.captured_step.explain()


@pytest.mark.filterwarnings("ignore:.*it waits for a value", "ignore:.*anomaly detection")
def test_steps_that_look_for_anomalies_equal_the_cpu_and_say_why_they_are_recorded(tmp_path: Path) -> None:
    options: dict[str, Any] = {"detect_anomaly": True, "enable_checkpointing": False, "num_epochs": 1}
    eager = train(tmp_path, accelerator="cpu", **options)
    strategy = LazyStrategy(capture=True)
    lazy = train(tmp_path, strategy=strategy, **options)
    assert all(map(torch.equal, numbers(*lazy), numbers(*eager)))
    assert strategy.captured_step is not None
    assert strategy.captured_step.num_replayed == 0
    assert "it waits for a value" in strategy.captured_step.explain()


@FORMS
def test_waits_do_not_depend_on_the_number_of_steps(capture: bool, tmp_path: Path) -> None:
    waits = []
    for num_steps in (8, 20):
        logger = CSVLogger(tmp_path, version=num_steps)
        options = {"logger": logger, "log_every_n_steps": 2, "enable_progress_bar": True, "num_epochs": 2}
        lazystep.metrics.reset()
        train(tmp_path, strategy=LazyStrategy(capture=capture), limit_train_batches=num_steps, **options)
        waits.append(count("synchronizations"))
    assert waits[0] == waits[1], lazystep.metrics.report()
    # For an epoch: the monitored metric, those of the epoch, and a checkpoint of each tensor.
    assert waits[0] <= 2 * 50, lazystep.metrics.report()


@FORMS
def test_training_resumes_in_mid_epoch_as_on_the_cpu(capture: bool, tmp_path: Path) -> None:
    resumed = []
    for name, options in (
        ("cpu", {"accelerator": "cpu"}),
        ("lazy", {"strategy": LazyStrategy(capture=capture)}),
    ):
        keep = ModelCheckpoint(tmp_path / name, every_n_train_steps=30, save_top_k=-1, filename="{step}")
        train(tmp_path / name, keep, num_epochs=2, **options)
        if name == "lazy":
            options = {"strategy": LazyStrategy(capture=capture)}
        resumed.append(
            train(tmp_path / name, num_epochs=3, resume=tmp_path / name / "step=30.ckpt", **options)
        )
    eager, lazy = resumed
    assert len(lazy[0].losses) == 30
    assert lazy[1].global_step == 60
    assert all(map(torch.equal, numbers(*lazy), numbers(*eager)))
    saved = [torch.load(tmp_path / name / "step=30.ckpt", weights_only=False) for name in ("cpu", "lazy")]
    assert saved[0]["loops"] == saved[1]["loops"]  # the counters
    assert {t.device.type for t in saved[1]["state_dict"].values()} == {"cpu"}
    on_cpu = train(
        tmp_path / "moved", num_epochs=3, resume=tmp_path / "lazy" / "step=30.ckpt", accelerator="cpu"
    )
    assert all(map(torch.equal, numbers(*on_cpu), numbers(*eager)))


@FORMS
def test_loggers_and_reports_get_what_they_get_on_the_cpu(
    capture: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Reporting(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            super().on_train_batch_end(outputs, batch, index)
            if reports is not None:
                reports(self.global_step, loss=outputs["loss"])

    common: dict[str, Any] = {"log_every_n_steps": 4, "num_epochs": 2, "kind": Reporting}
    reports = None
    logger = CSVLogger(tmp_path, name="cpu", version=0)
    module, _ = train(tmp_path, LearningRateMonitor(), logger=logger, accelerator="cpu", **common)
    waits = []
    for reports in (None, Reports(tmp_path / "reports", 40)):
        logger = CSVLogger(tmp_path, name="lazy", version=0 if reports is None else 1)
        strategy = LazyStrategy(capture=capture)
        lazystep.metrics.reset()
        train(tmp_path, LearningRateMonitor(), logger=logger, strategy=strategy, **common)
        waits.append(count("synchronizations"))
    assert waits[0] == waits[1]
    tables = [(tmp_path / name / "metrics.csv").read_text() for name in ("cpu/version_0", "lazy/version_1")]
    assert tables[0] == tables[1]
    assert len(tables[0].splitlines()) > 10
    assert reports is not None
    reports.check(
        list(range(1, 41)), [loss.item() for loss in module.losses], printed=capsys.readouterr().out
    )


@FORMS
def test_logger_is_called_in_order_on_one_thread_and_closed_after_that(capture: bool, tmp_path: Path) -> None:
    """A callback that calls the logger itself, a training that fails, and a second one that does not."""

    class Noting(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            calls.append((threading.get_ident(), sorted(metrics), step))
            assert not any(isinstance(v, torch.Tensor) and v.device.type == "lazy" for v in metrics.values())

        def finalize(self, status: str) -> None:
            calls.append(status)
            logger.log_metrics({"closed": 1}, step=99)  # at once

    class Calling(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *others: Any) -> None:
            trainer.logger.log_metrics({"mine": outputs["loss"]}, step=trainer.global_step)
            if trainer.global_step == fails_at:
                raise ArithmeticError("enough")

    found = []
    for fails_at in (7, 0):
        options: Any
        for options in ({"accelerator": "cpu"}, {"strategy": LazyStrategy(capture=capture)}):
            calls: list[Any] = []
            logger = Noting(tmp_path, version=len(found))
            arguments = {"logger": logger, "log_every_n_steps": 3, "num_epochs": 1, **options}
            if fails_at:
                with pytest.raises(ArithmeticError, match="enough"):
                    train(tmp_path, Calling(), LearningRateMonitor(), **arguments)
            else:
                train(tmp_path, Calling(), LearningRateMonitor(), **arguments)
            found.append([call if isinstance(call, str) else call[1:] for call in calls])
            *others, last = [call[0] for call in calls if isinstance(call, tuple)]
            assert len(set(others)) == 1
            assert last == threading.get_ident()
    assert found[0] == found[1]
    assert found[0][-3:] == [(["mine"], 7), "failed", (["closed"], 99)]
    assert found[2] == found[3]
    assert found[2][-2] == "success"


@pytest.mark.filterwarnings(
    "ignore:.*waits for a value:lazystep.LazyStepWarning"
)  # batch norm counts batches
def test_averaged_weights_have_their_epoch_of_statistics_in_captured_steps(tmp_path: Path) -> None:
    """Its forward passes have no backward pass and no update. Their graphs must be gone when `fit` ends."""

    def averaged(**options: Any) -> Any:
        return train(tmp_path, StochasticWeightAveraging(1e-2, swa_epoch_start=0.5), **options)

    eager = averaged(accelerator="cpu")
    strategy = LazyStrategy(capture=True)
    lazy = averaged(strategy=strategy)
    assert lazy[1].global_step == eager[1].global_step
    assert len(lazy[0].losses) == len(eager[0].losses) == 80
    assert all(map(torch.equal, numbers(*lazy), numbers(*eager)))
    assert strategy.captured_step is not None
    assert strategy.captured_step.num_replayed >= 40, strategy.captured_step.explain()


class CopyingPruning(ModelPruning):
    """On the CPU, Lightning makes the kept first weights the parameters: training overwrites them."""

    @staticmethod
    def _copy_param(new: nn.Module, old: nn.Module, name: str) -> None:
        ModelPruning._copy_param(new, copy.deepcopy(old), name)


@FORMS
@pytest.mark.parametrize("is_reset", [False, True], ids=["weights kept", "weights reset"])
def test_pruning_equals_the_cpu(is_reset: bool, capture: bool, tmp_path: Path) -> None:
    def pruned(kind: type[ModelPruning], **options: Any) -> Any:
        pruning = kind("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=is_reset)
        return train(tmp_path, pruning, **options)

    eager = pruned(CopyingPruning, accelerator="cpu")
    strategy = LazyStrategy(capture=capture)
    lazy = pruned(ModelPruning, strategy=strategy)
    assert sum(int((t == 0).sum()) for t in lazy[0].parameters()) > 50
    assert all(map(torch.equal, numbers(*lazy), numbers(*eager)))
    if capture:
        assert strategy.captured_step is not None
        assert strategy.captured_step.num_replayed >= 25, strategy.captured_step.explain()


@FORMS
def test_progress_bar_shows_values_that_have_arrived(capture: bool, tmp_path: Path) -> None:
    class Bar(TQDMProgressBar):
        def get_metrics(self, *args: Any) -> Any:
            found = super().get_metrics(*args)
            self.shown.append(found.get("loss_step"))
            return found

        shown: list[Any] = []  # noqa: RUF012

    strategy = LazyStrategy(capture=capture)
    module, _ = train(tmp_path, Bar(), strategy=strategy, enable_progress_bar=True, num_epochs=2)
    losses = {loss.item() for loss in module.losses}
    shown = [value for value in Bar.shown if value is not None]
    assert shown
    assert all(isinstance(value, float) and value in losses for value in shown)


@FORMS
def test_hooks_around_backward_run_as_on_the_cpu(capture: bool, tmp_path: Path) -> None:
    class Hooked(Module):
        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)

    class Freezing(lightning.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            module.net[0].bias.grad.zero_()

    eager = train(tmp_path, Freezing(), kind=Hooked, num_epochs=1, accelerator="cpu")
    strategy = LazyStrategy(capture=capture)
    lazy = train(tmp_path, Freezing(), kind=Hooked, num_epochs=1, strategy=strategy)
    assert all(map(torch.equal, numbers(*lazy), numbers(*eager)))
    plain = train(tmp_path, num_epochs=1, strategy=LazyStrategy())
    assert not all(map(torch.equal, numbers(*lazy), numbers(*plain)))
    if capture:
        assert strategy.captured_step is not None
        assert strategy.captured_step.num_replayed >= 10, strategy.captured_step.explain()


def test_testing_and_prediction_equal_the_cpu(tmp_path: Path) -> None:
    found = []
    for options in ({"accelerator": "cpu"}, {"strategy": LazyStrategy()}):
        lightning.seed_everything(1, verbose=False)
        loader, module = make_loader(), Module()
        trainer = lightning.Trainer(
            logger=False, enable_progress_bar=False, enable_checkpointing=False, **options
        )
        (tested,) = trainer.test(module, loader, verbose=False)
        lazystep.metrics.reset()
        predictions = trainer.predict(module, loader)
        found.append((tested, torch.cat([one.cpu() for one in predictions])))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


class Manual(Module):
    automatic_optimization = False


class Stepping(Module):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class Positional(Module):
    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(batch[0]).mean()
        self.log("loss", loss, True)
        return loss


def test_wrong_use_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one lazy device.*Leave `devices` out, or use LazyDDPStrategy"):
        lightning.Trainer(strategy=LazyStrategy(), devices=2, logger=False)
    with pytest.raises(ValueError, match=r"expected lazy.*LazyStrategy"):
        LazyAccelerator().setup_device(torch.device("cpu"))
    for kind, error, message in (
        (Manual, lazystep.UnsupportedError, "@lazystep.step"),
        (Stepping, lazystep.UnsupportedError, r"Stepping.optimizer_step.*Leave capture=True out"),
        (Positional, TypeError, "pass the options by name"),
    ):
        with pytest.raises(error, match=message):
            train(tmp_path, kind=kind, strategy=LazyStrategy(capture=True), gradient_clip_val=None)


class Overflowing(Module):
    """Some batches overflow in float16: their updates are skipped."""

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        loss = loss * torch.where(x.sum() > 3, torch.inf, 1.0)
        self.log("loss", loss.detach())
        return {"loss": loss}


@FORMS
@pytest.mark.filterwarnings("ignore:.*CUDA is not available", "ignore:.*it waits for a value")
@pytest.mark.filterwarnings("ignore:.*before .optimizer.step")
def test_float16_with_a_scaler_equals_the_cpu(capture: bool, tmp_path: Path) -> None:
    common: dict[str, Any] = {"kind": Overflowing, "num_epochs": 2, "enable_checkpointing": False}
    # On the CPU, Lightning's precision="16-mixed" means bfloat16: its plugin for float16 is named here.
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    eager = train(tmp_path, accelerator="cpu", plugins=[plugin], **common)
    strategy = LazyStrategy(capture=capture)
    lazy = train(tmp_path, strategy=strategy, precision="16-mixed", **common)
    assert any(not torch.isfinite(loss) for loss in eager[0].losses), "no step has overflowed"
    for want, got in zip(numbers(*eager), numbers(*lazy), strict=True):
        assert torch.equal(want.nan_to_num(), got.nan_to_num())
    assert lazy[1].precision_plugin.scaler.state_dict() == plugin.scaler.state_dict()
    if capture:
        assert strategy.captured_step is not None
        assert strategy.captured_step.num_replayed >= 25, strategy.captured_step.explain()


def test_an_error_in_the_step_comes_out_as_it_is(tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(batch[0]).mean()
            raise ArithmeticError(f"no step for {tuple(loss.shape)}")

    for capture in (False, True):
        with pytest.raises(ArithmeticError, match=r"no step for \(\)"):
            train(tmp_path, kind=Failing, strategy=LazyStrategy(capture=capture))


def test_a_logger_that_fails_is_an_error_of_the_training(tmp_path: Path) -> None:
    class Broken(CSVLogger):
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no space left")

    with pytest.raises(lazystep.ClosureError, match="no space left"):
        train(tmp_path, strategy=LazyStrategy(), logger=Broken(tmp_path), log_every_n_steps=1)
    lazystep.mark_step()


@pytest.mark.filterwarnings("ignore:.*pkg_resources is deprecated")
def test_example_learns_in_captured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_example("lightning_digits", monkeypatch, "--directory", tmp_path) == 0
    printed = capsys.readouterr().out
    num_recorded, num_replayed, _ = counts_in(printed)
    assert num_recorded + num_replayed == 120
    assert num_recorded <= 20
    assert (tmp_path / "best.ckpt").exists()
