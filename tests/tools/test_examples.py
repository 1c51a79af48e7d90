"""The examples run, learn, and replay their steps. See also closures/test_report and overlap/test_example."""

from __future__ import annotations

import re

from tests.helpers import ROOT, run_python

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints."""
    done = run_python("-W", "error", EXAMPLES / f"{name}.py", "--quick", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, text
    return [float(number) for number in found.groups()]


def test_digits_are_recognized_with_augmentation_in_workers() -> None:
    printed = run("digits")
    assert numbers(r"held-out accuracy ([\d.]+)", printed)[0] > 0.9
    recorded, replayed, captures = numbers(
        r"recorded (\d+) times, replayed (\d+) times, (\d+) capture", printed
    )
    assert (recorded + replayed, captures) == (6 * 28, 1)
    assert recorded <= 12


def test_lstm_carries_its_state_through_replays() -> None:
    printed = run("lstm")
    first, last, num_steps = numbers(r"loss ([\d.]+) -> ([\d.]+) in (\d+) steps", printed)
    assert last < 0.6 * first
    recorded, replayed, captures = numbers(
        r"recorded (\d+) times, replayed (\d+) times, (\d+) capture", printed
    )
    assert (recorded + replayed, captures) == (num_steps, 1)
    assert recorded <= 12


def test_both_steps_of_the_gan_are_replayed() -> None:
    printed = run("gan")
    near, num_clusters = numbers(r"([\d.]+) of the points near a cluster, (\d+) clusters", printed)
    assert near > 0.5
    assert num_clusters >= 6
    for step in ("discriminator_step", "generator_step"):
        pattern = rf"{step}: recorded (\d+) times, replayed (\d+) times, (\d+) capture"
        recorded, replayed, captures = numbers(pattern, printed)
        assert (recorded + replayed, captures) == (1000, 1)
        assert recorded <= 26


def test_every_example_is_listed_and_takes_quick() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"`{path.name}`" in listed
        assert '"--quick"' in path.read_text()
