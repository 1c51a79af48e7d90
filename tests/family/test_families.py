"""Families at work, without a compiler: a library is the lowered graph. Members, builds, regions, checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazystep
from lazystep import config, notices
from lazystep.compile.builder import BuildError, Request
from lazystep.compile.cache import Library
from lazystep.compile.lower import LoweringError, lower
from lazystep.compile.scalars import fixed_slots
from lazystep.compile.symbolic import NoFamilyError, guards_of, lower_family
from lazystep.family.plan import Region
from lazystep.program.signature import signature_of
from lazystep.runtime import runtime
from lazystep.tiers import families as families_module
from lazystep.tiers import tiered as tiered_module
from lazystep.tiers.families import Families

from ..helpers import count


class GraphBuilder:
    """Stands in for the builder: serves a request when it is told to, with the graph as the library."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.built: list[Request] = []
        self.calls: dict[Path, Callable[..., Any]] = {}
        self.on_disk: list[Library] = []
        self.checked: list[str] = []
        self.spoil: Callable[[list[torch.Tensor], list[torch.Tensor]], list[torch.Tensor]] | None = None

    def prepare(self, num_threads: int, if_cache_is_empty: bool = False) -> None:
        pass

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def find(self, *_: Any) -> None:
        return None

    def find_family(self, *_: Any) -> list[Library]:
        return self.on_disk

    def mark_checked(self, library: Library, member: str = "") -> None:
        self.checked.append(member)

    def load(self, path: Path) -> Callable[..., Any]:
        return self.calls[path]

    def close(self) -> None:
        pass

    def serve(self) -> None:
        """Build all that was asked for, and deliver it."""
        lazystep.wait_device_ops()
        while self.requests:
            request = self.requests.pop(0)
            self.built.append(request)
            try:
                request.deliver(self._build(request))
            except (NoFamilyError, LoweringError) as error:
                request.deliver(BuildError("family", str(error)))

    def _build(self, request: Request) -> Library:
        program, plan = request.program, request.plan
        signature = signature_of(program, fixed_slots(program))
        path = Path(f"library {len(self.calls)}")
        if plan is None:
            graph, _ = lower(program, signature, request.fixed)
            data = None
        else:
            made = lower_family(program, signature, request.fixed, plan.fit, plan.numbers)
            graph = made.graph
            data = Region(plan.fit, tuple(guards_of(made, plan.members))).to_data()

        def call(flat: list[torch.Tensor]) -> list[torch.Tensor]:
            with torch.no_grad():
                outputs = list(graph(*flat))
            return self.spoil(flat, outputs) if self.spoil is not None else outputs

        self.calls[path] = call
        return Library(path, str(path), frozenset(), (), data)


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphBuilder]:
    made = GraphBuilder()
    monkeypatch.setattr(runtime.tiers, "builder", made)
    monkeypatch.setattr(runtime.tiers, "families", Families(made))  # type: ignore[arg-type]
    monkeypatch.setattr(families_module, "load", made.load)
    monkeypatch.setattr(tiered_module, "load", made.load)
    runtime.programs.clear()  # programs of other tests have other builders
    with config.override(tier="auto", keep_memory=False):
        yield made
        lazystep.wait_device_ops()
    runtime.programs.clear()


WEIGHT = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def run(*sizes: int, step: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
    """A step of each size, right whatever happens."""
    for size in sizes:
        x = torch.randn(size, 4)
        function = step or (lambda x: (x @ WEIGHT.to(x.device)).tanh().sum(0))
        found = function(x.to("lazy"))
        lazystep.mark_step()
        torch.testing.assert_close(found.cpu(), function(x), rtol=1e-5, atol=1e-5)


def test_three_members_ask_for_one_build_and_the_rest_is_native_at_once(builder: GraphBuilder) -> None:
    run(5, 8, 11, 5, 8, 11, 5, 5, 5, 8)
    assert [request.plan is not None for request in builder.requests] == [True]
    assert (count("native_executions"), count("native_checks")) == (0, 0)
    assert count("executor_waits_for_compile") == 0
    builder.serve()
    run(5, 8, 11, 6, 7, 20)  # each is checked once, also those that the library was not made from
    assert (count("native_executions"), count("native_checks")) == (0, 6)
    run(5, 8, 11, 6, 7, 20)
    assert (count("native_executions"), count("native_checks")) == (6, 6)
    assert (len(builder.built), builder.requests) == (1, [])
    assert sorted(builder.checked) == ["11", "20", "5", "6", "7", "8"]


def test_one_shape_alone_gets_a_library_of_its_own(builder: GraphBuilder) -> None:
    run(5, 5, 5)
    assert [request.plan for request in builder.requests] == [None]
    builder.serve()
    run(5, 5)
    assert count("native_executions") == 1


def test_a_last_odd_batch_makes_a_family_of_two_when_it_repeats(builder: GraphBuilder) -> None:
    run(5, 5, 5)
    builder.serve()
    run(5, 3, 5, 3)
    assert builder.requests == []
    run(5, 3)
    assert builder.requests[0].plan is not None
    builder.serve()
    run(3, 3, 4)
    assert count("native_executions") == 2 + 1  # 5 twice after its check, 3 once after its own
    assert len(builder.built) == 2


def test_size_one_is_a_program_of_its_own(builder: GraphBuilder) -> None:
    run(5, 8, 11)
    builder.serve()
    run(1, 1, 1)
    assert count("native_checks") == 0
    assert [request.plan for request in builder.requests] == [None]


def test_a_wrong_generalization_is_found_counted_and_never_used(builder: GraphBuilder) -> None:
    def wrong_from_ten(flat: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [o + (1 if any(10 in t.shape for t in flat) else 0) for o in outputs]

    builder.spoil = wrong_from_ten
    run(5, 8, 11)
    builder.serve()
    with pytest.warns(
        notices.LazyStepWarning, match="disagrees with the reference executable for one of them"
    ):
        run(5, 8, 10, 10)  # right, because the reference's results are used
    assert count("family_mismatches") == 1
    assert count("native_executions") == 0
    run(5, 8, 6)  # members that were checked go on, others do not join any more
    assert (count("native_executions"), count("native_checks")) == (2, 3)
    assert "disagreed with the reference" in lazystep.debug.explain()


def test_members_outside_the_region_get_another_library(builder: GraphBuilder) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 4)).tanh().sum(0)

    run(6, 10, 14, 18, step=step)  # padded by two
    builder.serve()
    run(22, 26, step=step)
    assert count("native_checks") == 2
    run(7, 11, 15, 19, step=step)  # padded by one: sums of another kind
    lazystep.wait_device_ops()
    builder.serve()
    run(23, 27, 22, 26, step=step)
    assert count("native_mismatches") == 0
    assert 2 <= len(builder.built) <= 3
    assert count("native_executions") >= 2


def test_a_member_without_a_padding_of_one_is_traced(builder: GraphBuilder) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 4)).tanh().sum(0)

    run(9, 10, 15, step=step)  # the largest is padded by one, which torch takes for a special case
    builder.serve()
    assert count("families_refused") == 0
    run(9, 10, 13, 14, step=step)
    assert count("native_checks") == 4


def test_what_is_no_family_is_built_alone_and_explained(builder: GraphBuilder, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> Any:
        raise NoFamilyError("the size s0 is always 5")

    monkeypatch.setattr("tests.family.test_families.lower_family", refuse)
    run(5, 8, 11)
    builder.serve()
    run(5, 8, 5)
    assert [request.plan for request in builder.requests] == [None]
    assert "share no library: the size s0 is always 5" in lazystep.debug.explain()
    assert count("families_refused") == 1


def test_a_library_on_disk_serves_the_first_step(builder: GraphBuilder) -> None:
    run(5, 8, 11)
    builder.serve()
    run(9)
    (library,) = runtime.tiers.families.known()[0].libraries
    on_disk = library.library._replace(checked=frozenset({"9"}))
    builder.on_disk = [on_disk]
    runtime.tiers.families = Families(builder)  # type: ignore[arg-type]
    runtime.programs.clear()
    run(9, 12)
    assert count("native_executions") == 1  # 9 has been checked by another process
    assert count("native_checks") == 2  # 9 then, 12 now
    assert len(builder.built) == 1


def test_families_can_be_switched_off(builder: GraphBuilder) -> None:
    with config.override(families=False):
        run(5, 8, 11, 5, 8, 5)
    assert [request.plan for request in builder.requests] == [None]


def test_a_static_build_is_pointless_once_the_family_serves_its_program(builder: GraphBuilder) -> None:
    run(5, 5, 5)
    (alone,) = builder.requests
    assert alone.worth() > 0
    builder.requests.clear()
    run(8, 11, 8, 11)
    builder.serve()
    run(5)
    assert alone.worth() == 0
    run(5)
    assert count("native_executions") == 1


def test_explain_tells_members_symbols_and_lines(builder: GraphBuilder) -> None:
    run(5, 8, 11)
    assert "while a library for all of them is being built" in lazystep.debug.explain()
    builder.serve()
    run(5, 20)
    text = lazystep.debug.explain()
    assert "family 1: 4 programs that differ in sizes only" in text
    assert "s0: size 0 of input 0, taken by aten.mm.default at" in text
    assert "so far 5 to 20" in text
    assert "native, with the library of family 1 (s0 = 20)" in text
