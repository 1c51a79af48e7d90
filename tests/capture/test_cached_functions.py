"""Functions with a cache: a replay is right as long as the cache has the same results."""

import functools
from typing import Any

import pytest
import torch

from .common import captured

pytestmark = pytest.mark.filterwarnings("ignore::lazystep.LazyStepWarning")  # refused, which is right, too
ONES = torch.ones(3)


class Held:
    value: Any = None

    def __call__(self) -> Any:
        return self.value


@pytest.mark.parametrize("max_size", [None, 4])
def test_cleared_cache_that_had_none(max_size: int | None) -> None:
    """`None` is also the `__doc__` of the function, which is not what the cache has."""

    def make(value: Any) -> Any:
        def put(new: Any) -> None:
            nonlocal value
            value = new

        return (lambda: value), put

    get, put = make(None)
    fetch = functools.lru_cache(max_size)(lambda: get())
    run = captured(lambda x: x + 1 if fetch() is None else x * fetch())
    assert [run(ONES).tolist() for _ in range(4)] == [[2.0] * 3] * 4
    assert run.num_replayed == 2, run.explain()
    put(5.0)
    fetch.cache_clear()
    assert [run(ONES).tolist() for _ in range(4)] == [[5.0] * 3] * 4, run.explain()


def test_cleared_cache_that_has_the_same_result_for_another_key() -> None:
    held = Held()
    shared = torch.full((3,), 4.0).to("lazy")
    held.value = {1: shared, 2: torch.full((3,), 7.0).to("lazy")}
    fetch = functools.lru_cache(None)(lambda key: held()[key])
    run = captured(lambda x: x * fetch(1))
    assert [run(ONES).tolist() for _ in range(4)] == [[4.0] * 3] * 4
    held.value = {1: torch.full((3,), 9.0).to("lazy"), 2: shared}
    fetch.cache_clear()
    fetch(2)
    assert [run(ONES).tolist() for _ in range(3)] == [[9.0] * 3] * 3, run.explain()


@pytest.mark.parametrize("max_size", [None, 4])
@pytest.mark.parametrize(
    "wraps", [lambda tensor: tensor, lambda tensor: (tensor,), lambda tensor: {"a": [tensor]}]
)
def test_place_of_a_cached_result_gets_another_tensor(max_size: int | None, wraps: Any) -> None:
    """The cached function goes on with the tensor that it has returned; the place has another one."""

    def only(value: Any) -> torch.Tensor:
        while not isinstance(value, torch.Tensor):
            value = value["a"] if isinstance(value, dict) else value[0]
        return value

    held = Held()
    held.value = wraps(torch.full((3,), 3.0).to("lazy"))
    fetch = functools.lru_cache(max_size)(lambda: held())
    run = captured(lambda x: x * only(fetch()))
    assert [run(ONES).tolist() for _ in range(4)] == [[3.0] * 3] * 4
    held.value = wraps(torch.full((3,), 2.0).to("lazy"))
    assert [run(ONES).tolist() for _ in range(4)] == [[3.0] * 3] * 4, run.explain()
    fetch.cache_clear()
    assert [run(ONES).tolist() for _ in range(4)] == [[2.0] * 3] * 4, run.explain()
