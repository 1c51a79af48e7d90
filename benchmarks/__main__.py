"""Run all benchmarks, one after the other, and list every goal as met or missed.

    python -m benchmarks [--quick]

Writes `results/<name>.md` and `results/<name>.json` for each benchmark, the plots, `results/README.md` with
all goals, and the README's tables. The machine should do nothing else: each table shows how much processor
time others took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from .goals import TITLE
from .timing import RESULTS, Table

BENCHMARKS = (
    "recording",
    "closures",
    "checkpoints",
    "steps",
    "sizes",
    "large",
    "neighbours",
    "shapes",
    "precision",
    "overlap",
    "links",
    "scaling",
)


def summary(directory: Path) -> str:
    """A Markdown page: the reports in a directory, and all their goals with verdicts."""
    lines = ["# Results", ""]
    verdicts = []
    for name in BENCHMARKS:
        path = directory / f"{name}.json"
        if not path.exists():
            lines.append(f"- {name}: never run")
            continue
        report = json.loads(path.read_text())
        facts = report["machine"]
        lines.append(
            f"- [{name}]({name}.md): `{report['command']}`, {facts['date']}, {facts['processor']}, "
            f"torch {facts['torch']}"
        )
        for table in report["tables"]:
            if table["title"] == TITLE:
                verdicts += [[name, *row] for row in table["rows"]]
    num_met = sum(verdict == "met" for _, _, verdict, _ in verdicts)
    note = f"{num_met} of {len(verdicts)} met."
    goals = Table(TITLE, ["benchmark", "goal", "verdict", "numbers"], verdicts, note)
    return "\n".join([*lines, "", goals.to_markdown(), ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke runs: nothing is written")
    is_quick = parser.parse_args().quick
    failed = []
    for name in BENCHMARKS:
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if is_quick else [])]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if not is_quick:
        (RESULTS / "README.md").write_text(summary(RESULTS))
        for name in ("plots", "readme"):
            if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
                failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
