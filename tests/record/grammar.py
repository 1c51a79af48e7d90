"""The grammar of random programs: lines with holes, how often each kind is taken, and what fits a hole.

Holes are in braces: x, y, z, f, h, leaf are tensors, d a dimension of x, and so on. `program_writer.py` fills
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

CREATE = """
{new} = torch.arange(12., device=D).view({shape})
{new} = torch.linspace(-2, 3, 12, device=D).view({shape}).clone()
{new} = torch.randn({sizes}, device=D)
{new} = torch.randn({sizes}).to(D)
{new} = torch.randn({sizes}, device=D, dtype=torch.float64).requires_grad_()
{new} = torch.arange(6, device=D).reshape({shape})
{new} = torch.full(({sizes},), {s}, device=D)
{new} = torch.zeros({sizes}, dtype={dtype}, device=D)
{new} = torch.ones({sizes}, device=D).requires_grad_()
{new} = torch.linspace(-1, 1, 6, device=D).view({shape}).clone().requires_grad_()
{new} = torch.tensor([[1.5, -2.0], [0.0, {s}]], device=D)
{new} = torch.tensor([True, False, True], device=D)
{new} = torch.tensor({s}, device=D)
{new} = torch.empty({sizes}, device=D).fill_({s})
{new} = torch.zeros_like({x})
{new} = torch.ones_like({x}, dtype={dtype})
{new} = {x}.new_full((2, 3), {s})
{new} = torch.nn.Parameter({f}.detach().clone())
{new} = {f}.detach().clone().requires_grad_()
"""

COMPUTE = """
{new} = {x} + {y}
{new} = {x} * {y}
{new} = {x} - {s} * {y}
{new} = {x} * {s}
{new} = {x} + 1
{new} = -{x}
{new} = {x} > {s}
{new} = {x}.sum()
{new} = {x}.sum({d}, keepdim=True)
{new} = {f}.mean({d})
{new} = {f}.sin()
{new} = {f}.relu()
{new} = {x}.abs()
{new} = {f} * {f}.sigmoid()
{new} = {x}.cumsum({d})
{new} = {x}.clone()
{new} = {x}.contiguous()
{new} = {x}.t().contiguous()
{new} = {f}.to({dtype})
{new} = {x}.to({dtype})
{new} = {x}.float()
{new} = {x}.double()
{new} = {x}.bool()
{new} = {x}.to({x}.dtype)
{new} = {x}.type_as({y})
{new} = torch.cat([{x}, {y}], {d})
{new} = torch.stack([{x}, {x}])
{new} = torch.where({x} > 0, {x}, {y})
{new} = torch.maximum({x}, {y})
{new} = {f} @ {f}.t()
{new} = {f} @ {y}
{new} = {x}.max({d}).values
{new} = {x}.argmax()
{new} = {x}.sort({d}).values
{new} = {x}.flip(0)
{new} = {x}.roll(1)
{new} = {x}.repeat(2, {ones})
{new} = {x}.masked_fill({x} > 0, {s})
{new} = {x}.gather({d}, torch.zeros_like({x}, dtype=torch.int64))
{new} = torch.nn.functional.dropout({f}, 0.5)
{new} = torch.nn.functional.pad({x}, (1, 0))
{new} = torch.softmax({f}, {d})
{new} = {f}.softmax({d}).log()
{new} = torch.addcmul({f}, {f}, {f}, value={s})
{new} = torch.linalg.vector_norm({f})
"""

INDEX = """
{new} = {x}[{x} > 0]
{new} = {x}[torch.tensor([0, 0], device=D)]
{new} = {x}[torch.tensor([0, -1])]
{new} = {x}[[0, 0]]
{new} = {x}[:, [0, 0]]
{new} = {x}[..., torch.tensor([0], device=D)]
{new} = {x}.index_select({d}, torch.tensor([0, 0], device=D))
{new} = {x}.nonzero()
{new} = {x}.masked_select({x} != 0)
{new} = {x}.take(torch.tensor([0, 0], device=D))
{new} = {x}[torch.tensor([True] + [False] * (len({x}) - 1), device=D)]
{new} = {x}[({x} > 0).nonzero(as_tuple=True)]
"""

VIEW = """
{new} = {x}[{slice}]
{new} = {x}[{slice}]
{new} = {x}[{slice}][{slice}]
{new} = {x}.select({d}, 0)
{new} = {x}.select({d}, -1)
{new} = {x}.t()
{new} = {x}.T
{new} = {x}.mT
{new} = {x}.transpose({d}, {d})
{new} = {x}.swapaxes({d}, {d})
{new} = {x}.permute({perm})
{new} = {x}.movedim({d}, {d})
{new} = {x}.unsqueeze({d})
{new} = {x}.unsqueeze(0)
{new} = {x}.squeeze()
{new} = {x}.squeeze({d})
{new} = {x}.expand(2, {like})
{new} = {x}.unsqueeze(-1).expand({like}3)
{new} = {x}.expand_as({y})
{new} = torch.broadcast_to({x}, (2, {like}))
{new} = {x}.view({shape})
{new} = {x}.view({shape})
{new} = {x}.reshape({shape})
{new} = {x}.view_as({x})
{new} = {x}.view(torch.int32) if not {x}.is_inference() else {x}
{new} = {x}.view(torch.float32) if not {x}.is_inference() else {x}
{new} = {x}.flatten()
{new} = {x}.ravel()
{new} = {x}.unflatten({d}, (1, -1))
{new} = {x}.narrow({d}, {one}, 1)
{new} = {x}.narrow({d}, 0, {one})
{new} = {x}.diagonal()
{new} = {x}.diagonal({off})
{new} = {x}.unfold({d}, 2, 1)
{new} = {x}.unfold({d}, 1, 2)
{new} = {x}.as_strided((2,), (1,))
{new} = {x}.as_strided((2, 2), (1, 2), {one})
{new} = {x}.as_strided({x}.shape, {x}.stride())
{new} = {x}.detach()
{new} = {x}.data
{new} = {x}.real
{new} = {x}.grad
{new}, {new} = {x}.split([1, {rest}], {d})
{new}, *_ = {x}.split(2, {d})
{new}, *_ = {x}.chunk(2, {d})
{new}, *_ = {x}.unbind({d})
*_, {new} = {x}.unbind()
{new}, *_ = {x}.tensor_split(2)
{new} = torch.atleast_2d({x})
{new} = {x}
"""

WRITE = """
{x}.mul_({s})
{x}.add_({s})
{x} += {y}
{x} *= {y}
{x}.add_({y}, alpha=2)
{x}.sub_({y})
{x}.div_({s})
{x}.neg_()
{f}.tanh_()
{f}.sigmoid_()
{f}.relu_()
{x}.clamp_(-1, 1)
{x}.fill_({s})
{f}.fill_({y}.sum())
{x}.fill_({y}.detach().sum())
{x}.zero_()
{x}.copy_({y})
{x}.copy_({y})
{f}.copy_({y} * 2)
{f}.normal_()
{f}.uniform_()
{x}.bernoulli_(0.5)
{x}.masked_fill_({x} > {s}, {s})
{x}.masked_fill_({y} > 0, {s})
{x}.index_put_((torch.tensor([0, 0], device=D),), {x}[0])
{x}.index_put_((torch.tensor([0, 0], device=D),), torch.tensor(1, dtype={x}.dtype, device=D), accumulate=True)
{x}.scatter_({d}, torch.zeros_like({x}, dtype=torch.int64), {s})
{x}.scatter_add_({d}, torch.zeros_like({x}, dtype=torch.int64), {x})
{x}.index_fill_({d}, torch.tensor([0], device=D), {s})
{x}.index_add_({d}, torch.tensor([0], device=D), {x}.narrow({d}, 0, 1))
{x}.index_copy_({d}, torch.tensor([0], device=D), {x}.narrow({d}, -1, 1))
{x}.fill_diagonal_({s})
{x}.cumsum_({d})
{x}.lerp_({y}, 0.5)
{f}.addcmul_({f}, {y}, value={s})
{x}.masked_scatter_({x} > 0, {y})
{x}.where({x} > 0, {y}).add_(1)
{x}[{slice}] = {s}
{f}[{slice}] = {y} if {y}.dim() else {y}.clone()
{x}[{slice}] = {y}.detach() if {y}.dim() else {y}.detach().clone()
{x}[{slice}] += {s}
{x}[{slice}] *= {y}
{x}[{slice}].mul_({s})
{x}[{x} > 0] = {s}
{x}[{x} > 0] *= 2
{f}[{f} > 0] = {y}.flatten()[0]
{x}[torch.tensor([0, -1])] = {s}
{f}[[0]] = {y}
{f}[:] = {y} if {y}.dim() else {y}.clone()
{x}[...] = {x}.flip(0)
{x}.t().mul_({s})
{x}.flatten().add_({s})
{x}[0], {x}[1] = {x}[1].clone(), {x}[0].clone()
{x}.view(-1)[0] = {s}
{new} = {x}.add_({s})
{new} = {x}.mul_({y})
torch._foreach_add_([{x}, {y}], {s})
torch._foreach_mul_([{f}, {y}], [{s}, {s}])
torch.nn.init.constant_({f}, {s})
torch.relu_({f})
{x}.squeeze().mul_({s})
{x}.pow_(2)
{x}.logical_not_()
{x}.random_(0, 5)
"""

OUT = """
torch.add({x}, {y}, out={z})
torch.mul({x}, {s}, out={z})
torch.sub({x}, {x}, out={x})
torch.neg({x}, out={z})
torch.sum({x}, {d}, out={z})
torch.cat([{x}, {x}], out={z})
torch.stack([{x}, {x}], out={z})
torch.matmul({f}, {f}.t(), out={z})
torch.max({x}, {d}, out=({z}, torch.empty(0, dtype=torch.int64, device=D)))
torch.gt({x}, {s}, out={z})
torch.clamp({x}, 0, 1, out={z})
torch.where({x} > 0, {x}, {y}, out={z})
torch.index_select({x}, {d}, torch.tensor([0], device=D), out={z})
torch.cumsum({x}, {d}, out={z})
{new} = torch.exp({f}, out={z})
"""

METADATA = """
{x}.t_()
{x}.transpose_({d}, {d})
{x}.swapaxes_({d}, {d})
{x}.unsqueeze_({d})
{x}.unsqueeze_(0)
{x}.squeeze_()
{x}.squeeze_({d})
{x}.resize_({sizes}).fill_(1)
{x}.resize_({x}.shape)
{x}.resize_as_({y}).fill_(1)
{x}.as_strided_((2,), (1,))
{x}.as_strided_({x}.shape, {x}.stride())
{x}.detach_()
{x}.requires_grad_()
{f}.requires_grad_()
{x}.requires_grad_(False)
{x}.requires_grad = False
{x}.set_({y})
{x}.set_({x})
{x}.set_()
{x}.data = {y} if not {y}.is_inference() else {y}.clone()
{x}.data = {y} if not {y}.is_inference() else {y}.clone()
{x}.data = {x}.clone()
{x}.data = {x}.data[{slice}]
{x}.data = {x}.to({dtype})
{x}.data = {h}.clone()
{f}.data = {f}.data * {s}
{x}.data.mul_({s})
{x}.data[{slice}] = {s}
{x}.data.copy_({y})
{x}.data.t_()
{x}.data.zero_()
{x}.detach().add_({s})
{x}.detach()[{slice}].fill_({s})
{x}.grad = {y}
{x}.grad = None
{x}.grad.zero_()
{x}.grad.add_({s})
{x}.grad.data.mul_({s})
{x}.retain_grad()
{x}, {y} = {y}, {x}
"""

BACKWARD = """
{f}.sum().backward()
{f}.sum().backward(retain_graph=True)
{f}.square().sum().backward()
({f} * {y}).sum().backward()
({f} * torch.arange({f}.numel(), device=D).view({f}.shape)).sum().backward()
({f} * torch.arange({f}.numel(), device=D).view({f}.shape)).sum().backward(retain_graph=True)
{f}.backward({f}.detach().clone())
{f}.backward(torch.ones_like({f}))
{f}.mean().backward(create_graph=True)
{new} = torch.autograd.grad({f}.square().sum(), {leaf})[0].contiguous() * 1
{new} = torch.autograd.grad({f}.sum(), {leaf}, materialize_grads=True)[0].contiguous() * 1
{new} = torch.autograd.grad({f}.norm(), {leaf}, create_graph=True)[0].contiguous() * 1 if {f}.numel() else {f}
{leaf}.sum().backward()
({leaf} * {f}).sum().backward()
{leaf}[{slice}].square().sum().backward()
{leaf}.data.sub_({leaf}.grad, alpha=0.5)
with torch.no_grad(): {leaf}.sub_({leaf}.grad)
with torch.no_grad(): {leaf} -= 0.5 * {leaf}.grad
torch.optim.SGD([{leaf}], lr=0.5, momentum=0.5).step()
torch.nn.utils.clip_grad_norm_([{leaf}], 1.0)
{leaf}.register_hook(lambda g: g * 2)
torch.autograd.backward([{f}.sum(), {f}.sin().sum()])
"""

READ = """
read({x})
read({x}.tolist())
read({x}.sum().item())
read({x}.flatten()[0].item())
read(bool(({x} > 0).any()))
read(float({x}.sum()))
read(torch.equal({x}, {y}))
read({x}.detach().to("cpu", copy=True).numpy(force=True).sum())
read(len({x}))
read({x}.is_contiguous())
read({x}.grad)
read(str({x}.grad is None))
read({x}.any())
read([t.tolist() for t in {x}])
read({x}.detach().flatten().tolist())
read(torch.allclose({x}, {y}))
read({x}.is_set_to({y}))
read({x}._is_view())
read({x}.argmax().item())
"""

HOST = """
{newh} = {x}.to("cpu", copy=True)
{newh} = {x}.detach().to("cpu", copy=True)
{newh} = {x}.detach().to("cpu", copy=True)[{slice}]
{newh} = torch.arange(12.).view({shape})
{newh} = torch.randn({sizes})
{newh} = torch.tensor({s})
{newh} = {h} * {s}
{newh} = {h}[{slice}]
{newh} = {h}.t()
{new} = {h}.to(D, copy=True)
{new} = {h}.to(D, torch.float64, copy=True)
{new} = {x}.to(D)
{new} = {x}.to(D, copy=True)
{new} = {x} * {h}.sum().item()
{new} = {x} * {h}.sum()
{x}.copy_({h})
{h}.copy_({x})
{h}.copy_({x}.detach())
{h}[{slice}] = {x}.detach().to("cpu", copy=True)
{h}.add_({s})
{h}.mul_({h})
{h}.zero_()
{x}[{slice}] = {h}.detach().flatten()[0]
{x}[{slice}].copy_({h})
{x}.fill_({h}.detach().sum())
read({h})
({h} * {s}).sum().backward()
"""

STEP = """
lazystep.mark_step()
lazystep.mark_step()
lazystep.mark_step()
lazystep.mark_step(wait=True)
del {x}
del {x}
del {x}
del {h}
{x} = None
"""

# Each kind with how often it is taken.
GRAMMAR = {
    CREATE: 3,
    COMPUTE: 7,
    INDEX: 1,
    VIEW: 9,
    WRITE: 10,
    OUT: 1,
    METADATA: 3,
    BACKWARD: 5,
    READ: 3,
    HOST: 3,
    STEP: 4,
}
TEMPLATES = {kind: kind.strip().splitlines() for kind in GRAMMAR}
KINDS = [kind for kind, weight in GRAMMAR.items() for _ in range(weight)]
# Most lines stand by themselves.
AROUND = ["{}"] * 24 + ["with torch.no_grad(): {}"] * 4 + ["with torch.inference_mode(): {}"]
# Of these lines eager makes an odd kind of tensor under inference mode.
ALONE = ["with ", "view(torch", ".data ="]
SLICES = ["0", "-1", "1:", ":-1", "::2", "0:2", "1::2", "..., 0", "..., ::2", ":, 1:", ":, 0", "None"]
SLICES += ["..., None", "0, 0", ":, ::2", "1:, :-1", "..., -1:"]
DTYPES = [f"torch.{name}" for name in ("float32", "float64", "int64", "bool", "bfloat16")]


Pick = Callable[[Sequence[Any]], Any]
# Holes that are filled with any of these.
OPTIONS: dict[str, Sequence[Any]] = {
    "s": ["0.5", "2", "-1", "3", "0", "0.1", "-0.25", "True", "nan"],
    "slice": SLICES,
    "dtype": DTYPES,
    "one": (0, 1),
    "off": (1, -1),
    "sizes": ["3, 4", "2, 3", "4", "3, 3", "2, 2, 2", "1, 3", "0, 2", "2, 1, 3", "3", "1"],
    "shape": ["-1", "1, -1", "-1, 1", "-1, 2", "2, -1", "-1, 3", "2, 2, -1", "3, 1, -1"],
}
# Holes that are filled with something that fits the first tensor of the line.
FITTING: dict[str, Callable[[torch.Tensor, Pick], str]] = {
    "d": lambda x, pick: str(pick(range(-x.dim(), x.dim())) if x.dim() else 0),
    "perm": lambda x, pick: str(pick(list(itertools.permutations(range(x.dim()))))),
    "like": lambda x, pick: "-1, " * x.dim(),
    "ones": lambda x, pick: ", ".join(["1"] * (x.dim() - 1)),
    "rest": lambda x, pick: str(max(0, len(x) - 1) if x.dim() else 0),
}
