"""Transformers' Trainer on the lazy device and on the CPU: equal to the bit, resumed, captured."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import transformers.trainer
from accelerate.state import AcceleratorState, GradientState
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.masking_utils import create_causal_mask

import lazystep
from lazystep.integrations.transformers import LazyCallback, LazyTrainer, LazyTrainingArguments
from tests.helpers import count
from tests.integrations.examples import counts_in, run_example
from tests.integrations.reports import Reports

# Transformers 5.23 has another name for it, which 5.22 does not know.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*is deprecated:FutureWarning")

GPT2 = GPT2Config(
    vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make(
    path: Any, kind: str, is_padded: bool = False, report: Any = None, model: Any = None, **options: Any
) -> Trainer:
    """A trainer of a small GPT with dropout and tied weights: `cpu`, `lazy`, or `plain` with LazyCallback."""
    set_seed(1)
    model = model or GPT2LMHeadModel(copy.deepcopy(GPT2))
    ids = torch.randint(0, 40, (64, 8))
    data: list[dict[str, torch.Tensor]] = [{"input_ids": row, "labels": row} for row in ids]
    if is_padded:  # in some batches
        mask = torch.ones_like(ids)
        mask[::8, 5:] = 0
        data = [{**one, "attention_mask": row} for one, row in zip(data, mask, strict=True)]
    common: dict[str, Any] = {
        "output_dir": str(path),
        "max_steps": 60,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 20,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    own = {"use_cpu": True} if kind == "cpu" else {}
    args = (TrainingArguments if kind == "cpu" else LazyTrainingArguments)(**{**common, **own, **options})
    given: dict[str, Any] = {"model": model, "args": args, "train_dataset": data, "eval_dataset": data[:14]}
    if kind == "lazy":
        return LazyTrainer(**given, report=report)
    return Trainer(**given, callbacks=[LazyCallback()] if kind == "plain" else [])


def numbers(trainer: Trainer) -> list[torch.Tensor]:
    state = [t for s in trainer.optimizer.state.values() for t in s.values()]
    return [t.detach().cpu() for t in [*trainer.model.state_dict().values(), *state]]


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"is_padded": True, "max_steps": 24, "logging_steps": 8},
    "accumulated": {"gradient_accumulation_steps": 2, "max_steps": 12, "logging_steps": 4},
    "bf16": {"bf16": True, "max_steps": 12, "logging_steps": 4},
    "checkpointed": {"gradient_checkpointing": True, "max_steps": 12, "logging_steps": 4},
}


@functools.cache
def on_cpu(case: str) -> tuple[list[torch.Tensor], list[float], float]:
    with tempfile.TemporaryDirectory() as path:
        eager = make(path, "cpu", **CASES[case])
        eager.train()
        return numbers(eager), losses(eager), eager.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("case", "options"),
    [(case, options) for options in ({}, {"capture": True}) for case in CASES],
    ids=lambda value: value if isinstance(value, str) else "captured" if value else "recorded",
)
def test_training_and_evaluation_equal_the_cpu(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    expected, expected_losses, expected_evaluation = on_cpu(case)
    lazy = make(tmp_path, "lazy", **CASES[case], **options)
    lazystep.metrics.reset()
    lazy.train()
    waits = count("synchronizations")
    assert lazy.args.device.type == "lazy"
    assert next(lazy.model.parameters()).device.type == "lazy"
    assert losses(lazy) == expected_losses
    assert len(expected_losses) == 3
    assert all(map(torch.equal, numbers(lazy), expected))
    # Loss and norm of the gradients at each of three logs, and the loss at the end; never once a step.
    assert waits <= 7, lazystep.metrics.report()
    if lazy.captured_step is not None:
        num_calls = lazy.captured_step.num_recorded + lazy.captured_step.num_replayed
        assert (
            num_calls == {"plain": 60, "padded": 24, "accumulated": 24, "bf16": 12, "checkpointed": 12}[case]
        )
        assert lazy.captured_step.num_replayed >= num_calls // 3, lazy.captured_step.explain()
    lazystep.metrics.reset()
    assert lazy.evaluate()["eval_loss"] == expected_evaluation
    assert count("synchronizations") <= 2, lazystep.metrics.report()


@pytest.mark.filterwarnings("ignore:.*the class of a T5Config.*:lazystep.LazyStepWarning")
def test_decoder_with_a_cache_of_its_own_is_named_and_without_it_replayed(tmp_path: Path) -> None:
    size = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=40, **size, pad_token_id=0, decoder_start_token_id=0)
    options = {"max_steps": 9, "is_padded": True}
    trained = {}
    for kind, own in (("cpu", {}), ("lazy", {"capture": True})):
        for is_cached in (True, False):
            set_seed(2)
            model = T5ForConditionalGeneration(config)
            model.decoder.config.use_cache = is_cached
            trainer = trained[kind, is_cached] = make(tmp_path, kind, model=model, **options, **own)
            if kind == "lazy" and is_cached:
                with pytest.warns(lazystep.LazyStepWarning, match=r"set model\.decoder\.config\.use_cache"):
                    trainer.train()
            else:
                trainer.train()
    for is_cached in (True, False):
        eager, lazy = trained["cpu", is_cached], trained["lazy", is_cached]
        assert all(map(torch.equal, numbers(lazy), numbers(eager)))
        assert (lazy.captured_step.num_replayed == 0) == is_cached, lazy.captured_step.explain()


@pytest.mark.parametrize("options", [{}, {"capture": True}], ids=["recorded", "captured"])
def test_training_resumes_from_a_checkpoint_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    expected, _, _ = on_cpu("plain")
    part = make(tmp_path, "lazy", **options, save_strategy="steps", save_steps=30)
    part.args.max_steps = 60  # the schedule's length
    part.add_callback(StopAt(30))
    lazystep.metrics.reset()
    part.train()
    # Each tensor of the model and of the optimizer once, and the logs.
    assert count("synchronizations") <= 4 * len(list(part.model.parameters())) + 10, lazystep.metrics.report()
    saved = tmp_path / "checkpoint-30"
    assert (saved / "model.safetensors").exists()
    resumed = make(tmp_path / "other", "lazy", **options)
    resumed.train(resume_from_checkpoint=str(saved))
    assert resumed.state.global_step == 60
    assert resumed.model.lm_head.weight is resumed.model.transformer.wte.weight
    assert all(map(torch.equal, numbers(resumed), expected))


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def test_trainer_of_another_class_needs_only_the_arguments_and_the_callback(tmp_path: Path) -> None:
    plain = make(tmp_path, "plain")
    lazystep.metrics.reset()
    plain.train()
    assert count("synchronizations") <= 7, lazystep.metrics.report()
    assert count("programs_recorded") <= 70
    assert all(map(torch.equal, numbers(plain), on_cpu("plain")[0]))


def test_best_checkpoint_is_kept_and_metrics_are_those_of_the_cpu(tmp_path: Path) -> None:
    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}

    found = []
    for kind in ("cpu", "lazy"):
        every = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 8, "save_steps": 8}
        trainer = make(tmp_path / kind, kind, max_steps=16, **every, load_best_model_at_end=True)
        trainer.compute_metrics = accuracy
        trainer.train()
        history = [
            {name: value for name, value in entry.items() if name in ("eval_loss", "eval_accuracy")}
            for entry in trainer.state.log_history
        ]
        found.append((history, Path(trainer.state.best_model_checkpoint).name, numbers(trainer)))
    (history, best, mine), (lazy_history, lazy_best, lazy_mine) = found
    assert lazy_history == history
    assert lazy_best == best
    assert all(map(torch.equal, lazy_mine, mine))


@pytest.mark.parametrize("options", [{}, {"capture": True}], ids=["recorded", "captured"])
def test_all_reports_at_once_get_the_loss_of_each_update_without_a_wait(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = Reports(tmp_path / "reports", 12)
    seen: list[Any] = []

    def report(step: int, **values: Any) -> None:
        seen.append(values["loss"])
        reports(step, **values)

    trainer = make(tmp_path, "lazy", report=report, max_steps=12, logging_steps=4, **options)
    lazystep.metrics.reset()
    trainer.train()
    assert count("synchronizations") <= 7, lazystep.metrics.report()
    lazystep.flush_step_closures()
    printed = capsys.readouterr().out
    per_step = [loss.item() for loss in seen]
    reports.check(list(range(12)), per_step, printed)
    means = [np.mean(per_step[i : i + 4]) for i in (0, 4, 8)]
    assert means == pytest.approx(losses(trainer), rel=1e-5)


def test_tied_weights_are_saved_once_and_loaded(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2).to("lazy")
    model.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    state = loaded.state_dict()
    assert all(torch.equal(value.cpu(), state[name]) for name, value in model.state_dict().items())


def test_masks_of_an_encoder_are_looked_at_on_the_host() -> None:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=40, **size)).eval()
    twin = BertForSequenceClassification(model.config).eval().to("lazy")
    twin.load_state_dict(model.state_dict())
    for mask in (torch.ones(3, 8, dtype=torch.int64), (torch.arange(24).view(3, 8) < 20).long()):
        ids = torch.randint(1, 40, (3, 8))
        expected = model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 1, 0])).loss
        lazystep.metrics.reset()
        loss = twin(
            input_ids=ids.to("lazy"),
            attention_mask=mask.to("lazy"),
            labels=torch.tensor([0, 1, 0]).to("lazy"),
        ).loss
        lazystep.mark_step()
        assert count("synchronizations") == 0, lazystep.metrics.report()
        assert torch.equal(loss.cpu(), expected)


@torch.no_grad()
def test_packed_sequences_are_separated_without_a_wait() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
    ids = torch.randint(0, 40, (2, 8))
    model = GPT2LMHeadModel(GPT2).eval()
    expected = model(input_ids=ids, position_ids=positions).logits
    model.to("lazy")
    lazystep.metrics.reset()
    logits = model(input_ids=ids.to("lazy"), position_ids=positions.to("lazy")).logits
    lazystep.mark_step()
    assert count("synchronizations") == 0, lazystep.metrics.report()
    assert torch.equal(logits.cpu(), expected)


def test_positions_that_the_host_does_not_know_are_checked() -> None:
    config = GPT2Config(n_embd=4, n_head=1)
    config._attn_implementation = "sdpa"
    embedded = torch.zeros(1, 6, 4, device="lazy")
    for positions in (torch.arange(6), torch.arange(6) % 3):
        computed = positions.to("lazy")[None] * 1
        assert create_causal_mask(config, embedded, None, None, position_ids=computed) is None
        lazystep.mark_step()
        if positions[-1] == 5:
            lazystep.flush_step_closures()
    with pytest.raises(lazystep.ClosureError, match="Put `position_ids` into the batch"):
        lazystep.flush_step_closures()


class ScalingOnCpu(accelerate.Accelerator):
    """Accelerate itself makes no scaler for the CPU, and does not cast there."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scaler = torch.amp.GradScaler("cpu")
        self.native_amp = True


def test_float16_with_overflows_equals_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"fp16": True, "max_steps": 24, "logging_steps": 8, "save_strategy": "steps"}
    options |= {"save_steps": 12, "lr_scheduler_type": "linear", "warmup_steps": 4}
    found = []
    for kind in ("cpu", "lazy"):
        with monkeypatch.context() as patch:
            if kind == "cpu":
                patch.setattr(transformers.trainer, "Accelerator", ScalingOnCpu)
            trainer = make(tmp_path / kind, kind, **options)
        trainer.accelerator.scaler.load_state_dict(
            {**trainer.accelerator.scaler.state_dict(), "scale": 2.0**40, "growth_interval": 8}
        )
        trainer.train()
        found.append((trainer.lr_scheduler.state_dict(), trainer.accelerator.scaler.state_dict()))
        found[-1] += (losses(trainer), trainer.evaluate()["eval_loss"], numbers(trainer))
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert trainer.args.device.type == "lazy"
    assert (tmp_path / "lazy" / "checkpoint-12" / "scaler.pt").exists()
    *want, eager = found[0]
    *got, lazy = found[1]
    assert got == want
    assert want[1]["scale"] < 2.0**40, "no step has overflowed"
    assert all(map(torch.equal, eager, lazy))


class LooksAtGradients(TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_wrong_use_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"use_cpu=True.*leave it out"):
        LazyTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(lazystep.UnsupportedError, match=r"fp16=True with capture=True.*Use bf16=True"):
        LazyTrainingArguments(output_dir=str(tmp_path), fp16=True, capture=True)
    with pytest.raises(lazystep.UnsupportedError, match=r"torch_compile=True: leave it out"):
        LazyTrainingArguments(output_dir=str(tmp_path), torch_compile=True)
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(lazystep.UnsupportedError, match=r"fsdp in 2 processes.*Leave it out"):
            LazyTrainingArguments(output_dir=str(tmp_path), fsdp="full_shard")
    with pytest.raises(ValueError, match="pass LazyTrainingArguments"):
        LazyTrainer(GPT2LMHeadModel(GPT2), TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(ValueError, match="use LazyTrainer"):
        make(tmp_path, "plain", capture=True).train()
    trainer = make(tmp_path, "lazy", capture=True)
    trainer.add_callback(LooksAtGradients)
    with pytest.raises(lazystep.UnsupportedError, match=r"LooksAtGradients.*capture=False"):
        trainer.train()


def test_example_learns_and_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_example("hf_trainer", monkeypatch, "--directory", tmp_path) == 0
    printed = capsys.readouterr().out
    num_recorded, num_replayed, num_captures = counts_in(printed)
    assert num_captures == 1
    assert num_recorded + num_replayed == 80
    assert num_recorded <= 12
    assert "largest difference after resuming 0\n" in printed
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 80
