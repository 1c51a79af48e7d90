"""The pure parts of the training-step table: verdicts and tables follow from the numbers."""

import copy
import json
import math
from dataclasses import asdict

import pytest
import torch

import lazystep
from benchmarks import readme, steps
from benchmarks.__main__ import summary
from benchmarks.steps_report import (
    AUDITS,
    COMPILED_MODEL,
    COMPILED_STEP,
    EAGER,
    FUSED,
    GOALS,
    IN_A_LOOP,
    JAX,
    LOOP,
    REPLAY_CALL,
    STEP,
    STEP_UNTIL_NATIVE,
    TORCH_LAZY,
    UNTIL_NATIVE,
    VARIANTS,
    Goal,
    Outcome,
    all_tables,
    audit_share,
    geometric_mean,
    goals_table,
    rates_table,
    steps_table,
)
from benchmarks.timing import Measurements
from lazystep.capture import audits
from tests.helpers import ROOT, run_python

# Seconds a step: every goal is met.
GOOD = dict(zip(VARIANTS, (10.0, 9.0, 8.0, 7.0, 90.0, 6.0, 5.0, 4.0), strict=True))


def make_outcome(failures=(), others=0.0, **changed):
    """Two rounds; the second on a machine half as fast, which must not show in ratios."""
    names = {"jax": JAX, "loop": LOOP, "step": STEP, "compiled": COMPILED_STEP}
    seconds = GOOD | {names[name]: value for name, value in changed.items()}
    steps = Measurements({name: [value, 2 * value] for name, value in seconds.items()}, others=others)
    steps.samples |= {f"{name}, native": [1.0, 1.0] for name in (LOOP, STEP)}
    for name in failures:
        steps.failures[name] = f"{name} broke"
        steps.samples[name] = steps.samples[name][:1]  # it broke in the second round
    once = Measurements({f"first step, {EAGER}": [0.1], f"first step, {LOOP}": [0.3], "warm start": [0.5]})
    once.samples |= {UNTIL_NATIVE: [20.0], REPLAY_CALL: [90e-6], IN_A_LOOP: [2e-4], AUDITS: [0.008]}
    once.samples |= {f"first step, {COMPILED_MODEL}": [26.0], STEP_UNTIL_NATIVE: [16.0]}
    busy = Measurements({LOOP: [5.0, 5.0], f"{LOOP}, busy": [10.0, 20.0]})
    busy.samples |= {STEP: [5.0, 5.0], f"{STEP}, busy": [5.2, 5.2]}
    return Outcome(steps, once, busy)


def verdicts(outcomes):
    return {goal.text: goal.judge(outcomes)[0] for goal in GOALS}


def test_good_numbers_meet_every_goal():
    assert set(verdicts(dict.fromkeys(("mlp", "gpt", "lstm"), make_outcome())).values()) == {"met"}


def test_one_slow_model_misses_the_goal_for_each_but_not_the_mean():
    judged = verdicts({"mlp": make_outcome(loop=9.5), "gpt": make_outcome(loop=2.0)})
    assert judged[f"{LOOP}: 1.1 times eager's rate on each"] == "missed"
    assert judged[f"{LOOP}: 1.6 times eager's rate, geometric mean"] == "met"
    assert judged[f"{LOOP}: ahead of JAX on each"] == "missed"


def test_best_compiled_variant_is_the_one_to_beat():
    judged = verdicts({"gpt": make_outcome(compiled=4.5)})
    assert GOOD[COMPILED_MODEL] > GOOD[LOOP]
    assert judged[f"{LOOP}: ahead of the best torch.compile on each"] == "missed"
    assert judged[f"{STEP}: ahead of the best torch.compile on each"] == "met"


def test_fused_eager_counts_in_the_mean_against_the_best():
    text = f"{LOOP}: ahead of the best of torch.compile and fused eager, geometric mean"
    good, behind = make_outcome(), make_outcome()
    assert verdicts({"mlp": good, "gpt": good})[text] == "met"
    behind.steps.samples[FUSED] = [GOOD[LOOP] / 4, GOOD[LOOP] / 2]
    assert verdicts({"mlp": good, "gpt": behind})[text] == "missed"


def test_a_failed_peer_leaves_its_goal_open():
    judged = verdicts({"gpt": make_outcome(failures=[JAX])})
    assert judged[f"{LOOP}: ahead of JAX on each"] == "not measured"
    assert judged[f"{LOOP}: ahead of the best torch.compile on each"] == "met"


def test_a_failed_lazystep_meets_none_of_its_goals():
    judged = verdicts({"mlp": make_outcome(), "gpt": make_outcome(failures=[LOOP])})
    rates = [verdict for text, verdict in judged.items() if text.startswith(LOOP) and "rate" in text]
    assert rates == ["not measured"] * 2


def test_steps_off_the_native_tier_miss():
    outcome = make_outcome()
    outcome.steps.samples[f"{LOOP}, native"] = [0.5, 0.5]
    assert verdicts({"gpt": outcome})[f"{LOOP}: all measured steps ran natively"] == "missed"


def test_a_late_library_and_slow_steps_meanwhile_miss_their_goals():
    late, slow = make_outcome(), make_outcome()
    late.once.samples[UNTIL_NATIVE] = [27.0]
    slow.once.samples[STEP_UNTIL_NATIVE] = [40.0]  # eager takes 15 s in the median of both rounds
    texts = [goal.text for goal in GOALS if goal.text.startswith(("until native", "cold start"))]
    judged = [
        [verdicts({"gpt": outcome})[text] for text in texts] for outcome in (make_outcome(), late, slow)
    ]
    assert judged == [["met", "met", "met"], ["missed", "met", "met"], ["met", "missed", "met"]]
    slow.once.samples[UNTIL_NATIVE] = [60.0]
    assert verdicts({"gpt": slow})[texts[-1]] == "missed"


def test_replay_call_is_judged_on_the_gpt_alone():
    (goal,) = (goal for goal in GOALS if goal.text.startswith("replay call"))
    slow = make_outcome()
    slow.once.samples[REPLAY_CALL] = [150e-6]
    assert goal.judge({"mlp": slow, "gpt": make_outcome()}) == ("met", "gpt 90 µs")
    assert goal.judge({"gpt": slow}) == ("missed", "gpt 150 µs")
    assert goal.judge({"mlp": slow}) == ("not measured", "gpt missing")


def test_audits_are_judged_on_each_model():
    (goal,) = (goal for goal in GOALS if goal.text.startswith("steady audits"))
    often = make_outcome()
    often.once.samples[AUDITS] = [0.02]
    assert goal.judge({"mlp": make_outcome(), "gpt": make_outcome()})[0] == "met"
    assert goal.judge({"mlp": make_outcome(), "gpt": often}) == ("missed", "mlp 0.8 %, gpt 2 %")
    del often.once.samples[AUDITS]
    assert goal.judge({"mlp": make_outcome(), "gpt": often})[0] == "not measured"


def test_share_of_audits_is_what_they_cost_beyond_replays():
    calls = [(1e-4, False)] * 99 + [(1e-2, True)]
    assert math.isclose(audit_share(calls, 1.0), 0.0099)
    assert audit_share(calls[:-1], 1.0) is None  # no audit
    assert audit_share(calls[-1:], 1.0) is None  # nothing but an audit


def test_audits_of_a_step_are_measured_from_one_to_the_next(monkeypatch):
    worker = steps.Worker.__new__(steps.Worker)
    worker.system = steps.load_system("lazystep")
    worker.name = STEP
    weight = torch.zeros(2, 2, device="lazy")
    monkeypatch.setattr(audits, "_EARLY_AUDITS", 1)
    monkeypatch.setattr(audits, "_MIN_INTERVAL", 3)
    monkeypatch.setattr(audits, "_AUDIT_SHARE", 1e6)
    worker.step = lazystep.step(lambda x, y: weight.add_(x * y))
    worker.make_batch = lambda: (torch.ones(2, 2), torch.ones(2, 2))
    before = lazystep.metrics.counter_value("captures_audited")
    numbers = worker.audits(max_seconds=60)
    assert lazystep.metrics.counter_value("captures_audited") == before + 2
    assert set(numbers) == {AUDITS, IN_A_LOOP}
    assert worker.audits(max_seconds=0) == {}


@pytest.mark.parametrize(
    ("number", "verdict"), [(1.0, "met"), (2.0, "met"), (0.99, "missed"), (2.01, "missed")]
)
def test_bounds_are_inclusive(number, verdict):
    goal = Goal("between", lambda _: {"x": number}, at_least=1.0, at_most=2.0)
    assert goal.judge({})[0] == verdict


def test_a_number_out_of_bounds_misses_whatever_else_is_missing():
    assert Goal("", lambda _: {"x": 0.5, "y": None}, at_least=1.0).judge({}) == ("missed", "x 0.5, y missing")


def test_geometric_mean_of_a_ratio_and_its_inverse_is_one():
    assert math.isclose(geometric_mean([4.0, 0.25]), 1.0)


def test_tables_are_rectangular_and_say_what_failed():
    outcomes = {"mlp": make_outcome(failures=[TORCH_LAZY]), "gpt": make_outcome()}
    for table in all_tables(outcomes):
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title
    row = steps_table(outcomes).rows[0]
    assert row[1 + VARIANTS.index(TORCH_LAZY)] == f"{TORCH_LAZY} broke"
    rates = rates_table(outcomes)
    lazy, loop = 1 + VARIANTS.index(TORCH_LAZY), 1 + VARIANTS.index(LOOP)
    assert [row[lazy] for row in rates.rows] == ["-", "0.11 [0.11, 0.11]", "0.11 of 1"]
    assert [row[loop] for row in rates.rows] == ["2.00 [2.00, 2.00]"] * 2 + ["2.00"]


def test_goals_of_a_busy_machine_are_marked():
    assert "busy machine" not in goals_table({"gpt": make_outcome()}).note
    assert "busy machine" in goals_table({"gpt": make_outcome(others=0.5)}).note


def test_without_its_environment_jax_is_skipped_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr(steps, "JAX_PYTHON", tmp_path / "python")
    variants, missing = steps.available(VARIANTS)
    assert variants == [name for name in VARIANTS if name != JAX]
    assert "make bench-peers" in missing[JAX]
    outcome = make_outcome()
    outcome.steps.failures |= missing
    del outcome.steps.samples[JAX]
    assert missing[JAX] in steps_table({"gpt": outcome}).rows[0]
    assert verdicts({"gpt": outcome})[f"{STEP}: ahead of JAX on each"] == "not measured"


def test_summary_lists_every_goal_and_what_was_never_run(tmp_path):
    outcomes = {"mlp": make_outcome(), "gpt": make_outcome(loop=50.0)}
    facts = {"date": "2026-01-01", "processor": "one", "torch": "2"}
    tables = [asdict(goals_table(outcomes))]
    report = {"command": "python -m benchmarks.steps", "machine": facts, "tables": tables}
    (tmp_path / "steps.json").write_text(json.dumps(report))
    text = summary(tmp_path)
    assert "- overlap: never run" in text
    assert sum(line.startswith("| steps | ") for line in text.splitlines()) == len(GOALS)
    missed = [line for line in text.splitlines() if "| missed |" in line]
    assert any(f"{LOOP}: 1.1 times eager's rate on each" in line for line in missed)
    num_met = sum(" | met | " in line for line in text.splitlines())
    assert f"{num_met} of {len(GOALS)} met." in text


def test_readme_shows_the_numbers_and_the_date_of_the_reports_on_disk():
    reports = readme.load_reports()
    text = readme.README.read_text()
    assert readme.with_measured_part(text, reports) == text, "run `python -m benchmarks.readme`"
    other = text.replace(reports["steps"]["machine"]["date"], "1999-12-31").replace(
        "| GPT, 4", "| 99.9 | GPT, 4"
    )
    assert other != text
    assert readme.with_measured_part(other, reports) == text
    with pytest.raises(ValueError, match="found 0 times"):
        readme.with_measured_part("# A page without the marks", reports)


def test_readme_says_which_variant_failed():
    reports = copy.deepcopy(readme.load_reports())
    gpt = reports["steps"]["measurements"]["gpt"]
    del gpt["samples"][JAX]
    gpt["failures"][JAX] = "no environment"
    lines = readme.measured_part(reports).splitlines()
    row = next(line for line in lines if line.startswith("| GPT"))
    assert row.split(" | ")[5] == "fails"
    assert any(f"{JAX} fails on some" in line for line in lines)


def test_readme_says_which_variant_failed_beside_a_spinning_thread():
    reports = copy.deepcopy(readme.load_reports())
    busy = {name: reports["steps"]["measurements"][f"{name}, busy"] for name in ("mlp", "gpt")}
    busy["mlp"]["samples"][f"{STEP}, busy"].pop()  # it broke in the last round
    busy["mlp"]["failures"][f"{STEP}, busy"] = "broke"
    del busy["gpt"]["samples"][f"{STEP}, busy"]
    lines = readme.measured_part(reports).splitlines()
    row = next(
        line for line in lines if line.startswith(f"| rate kept beside a spinning Python thread, %: {STEP}")
    )
    assert "MLP fails, GPT fails, conv net " in row
    assert row.count("fails") == 2


def test_large_models_have_the_parameters_of_their_names_and_goals_follow_from_numbers():
    from benchmarks import large
    from benchmarks.models import LARGE, make_workload

    assert make_workload("gpt:32").model is not None
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in make().model.parameters()) for name, make in LARGE.items()}
    assert [round(size / 1e6) for size in sizes.values()] == [51, 121]
    seconds = {EAGER: [2.0, 4.0], STEP: [1.0, 2.0], LOOP: [2.5, 5.0]}
    once = Measurements({UNTIL_NATIVE: [20.0], f"first step, {COMPILED_MODEL}": [19.0]})
    outcome = large.Outcome(Measurements(seconds), once, {EAGER: 100.0, LOOP: 110.0})
    assert [goal.judge({"gpt": outcome})[0] for goal in large.GOALS] == ["met", "missed", "missed", "met"]
    missing = large.Outcome(Measurements({EAGER: [1.0]}), Measurements(), {})
    assert [goal.judge({"gpt": missing})[0] for goal in large.GOALS] == ["not measured"] * 4
    failed = dict.fromkeys(large.VARIANTS, "it broke")
    rows = large.to_table({"gpt": outcome._replace(steps=Measurements(seconds, failures=failed))}).rows
    assert [row[2] for row in rows[:-1]] == ["it broke"] * len(large.VARIANTS)


def test_precision_names_the_processors_features_and_has_a_cell_for_each_type():
    done = run_python("-m", "benchmarks.precision", "--quick", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "features for bfloat16 and float16" in done.stdout
    times, peaks = [line for line in done.stdout.splitlines() if line.startswith("| mlp:16 |")]
    assert len(times.split(" | ")) == 1 + 6 + 3
    assert all(float(cell) > 0 for cell in peaks.strip("| ").split(" | ")[1:])


def test_neighbours_verdicts_follow_from_numbers():
    from benchmarks import neighbours

    # The second round is on a machine half as fast.
    seconds = {
        neighbours.WITHOUT: [4.0, 8.0],
        neighbours.IDLE: [4.0, 8.0],
        neighbours.STEP_ALONE: [2.0, 4.0],
        neighbours.ALTERNATING: [6.0, 12.0],
    }

    def judged(**changed):
        samples = seconds | {getattr(neighbours, name): value for name, value in changed.items()}
        return [goal.judge({"mlp": Measurements(samples)})[0] for goal in neighbours.GOALS]

    assert judged() == ["met", "met"]
    assert judged(IDLE=[12.0, 24.0]) == ["missed", "met"]
    assert judged(ALTERNATING=[8.0, 16.0]) == ["met", "missed"]


def test_neighbours_measures_each_variant_in_a_process_of_its_own():
    done = run_python("-m", "benchmarks.neighbours", "--quick", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| mlp |"))
    assert len(row.strip("| ").split(" | ")) == 8
    assert "eager work while lazystep idles, without lazystep = 1" in done.stdout
