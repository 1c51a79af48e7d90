"""torch_xla's collectives on the lazy device: recorded, and equal to torch.distributed on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lazystep
import lazystep.compat.torch_xla as torch_xla
import lazystep.compat.torch_xla.core.xla_model as xm
import lazystep.compat.torch_xla.runtime as xr
from tests.helpers import count
from tests.pool import Pool, World

from .cases import mlp


def train(world: World, is_lazy: bool) -> dict[str, Any]:
    """Three steps in which each rank has data of its own; gradients are averaged."""
    torch.manual_seed(world.rank)
    model = mlp().to("lazy" if is_lazy else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if is_lazy:
        xm.broadcast_master_param(model)
        lazystep.wait_device_ops()
        lazystep.metrics.reset()
    else:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
    for step in range(3):
        x = torch.full((2, 6), 0.1 * (world.rank + step))
        model(x.to(next(model.parameters()).device)).square().mean().backward()
        if is_lazy:
            xm.optimizer_step(optimizer, barrier=True)
        else:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad.mul_(1.0 / world.size)
            optimizer.step()
        optimizer.zero_grad()
    counted = {name: count(name) for name in ("programs_recorded", "synchronizations")}
    return {"parameters": [p.detach().cpu() for p in model.parameters()], **counted}


def test_optimizer_step_averages_gradients_as_torch_distributed_does(lazy_pool: Pool) -> None:
    expected = lazy_pool.run(train, False, num_ranks=3)
    found = lazy_pool.run(train, True, num_ranks=3)
    for theirs, ours in zip(expected, found, strict=True):
        for a, b in zip(theirs["parameters"], ours["parameters"], strict=True):
            assert torch.equal(a, b)
        assert (ours["programs_recorded"], ours["synchronizations"]) == (3, 0)


def communicate(world: World, directory: str) -> dict[str, Any]:
    x = torch.tensor([world.rank + 1.0, 2.0]).to("lazy")
    in_place = [x.clone(), x * 10]
    path = Path(directory) / "saved.pt"
    found = {
        "sum": xm.all_reduce(xm.REDUCE_SUM, x, scale=0.5),
        "max": xm.all_reduce(xm.REDUCE_MAX, x),
        "list": xm.all_reduce(xm.REDUCE_SUM, in_place),
        "gathered": xm.all_gather(x[None], dim=1),
        "x": x,
    }
    xm.save(found, path)  # the first rank writes, and all end their programs here
    torch_xla.sync(wait=True)
    return {
        **lazystep.to_cpu(found),
        "payloads": xm.rendezvous("here", bytes([world.rank])),
        "reduced": xm.mesh_reduce("ranks", {"rank": x[0]}, lambda all_: [d["rank"].item() for d in all_]),
        "on one": xm.do_on_ordinals(lambda a: a[0].item(), (x,), ordinals=(1,)),
        "ordinals": (xr.world_size(), xr.global_ordinal(), xm.is_master_ordinal(local=False)),
    }


def test_collectives_give_what_the_ranks_have(lazy_pool: Pool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        answers = lazy_pool.run(communicate, directory, num_ranks=3)
        saved = torch.load(Path(directory) / "saved.pt")
    for rank, found in enumerate(answers):
        assert found["sum"].tolist() == [3.0, 3.0]
        assert found["max"].tolist() == [3.0, 2.0]
        assert [tensor.tolist() for tensor in found["list"]] == [[6.0, 6.0], [60.0, 60.0]]
        assert found["gathered"].tolist() == [[1.0, 2.0, 2.0, 2.0, 3.0, 2.0]]
        assert found["x"].tolist() == [rank + 1.0, 2.0]
        assert found["payloads"] == [b"\x00", b"\x01", b"\x02"]
        assert found["reduced"] == [1.0, 2.0, 3.0]
        assert found["on one"] == (2.0 if rank == 1 else None)
        assert found["ordinals"] == (3, rank, rank == 0)
    assert saved["x"].tolist() == [1.0, 2.0]
