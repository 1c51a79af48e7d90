"""`torch._lazy` on lazystep: `import lazystep.compat.torch_lazy as torch_lazy`.

Modules and parameters are those of `torch._lazy`. Reading order: this module, closure, device_context,
metrics, debug, computation, extract_compiled_graph, tensor_factory_functions, ir_cache, config, ts_backend.
"""

from ...barrier import mark_step as _mark_step
from ...barrier import run_step_closures as _run_step_closures
from ...reads import save as _save
from ...reads import sync_multi as _sync_multi
from ...reads import to_cpu as _to_cpu
from ...reads import wait_device_ops as _wait_device_ops
from ...record.tensor import get_tensor_id as _get_tensor_id
from ...step_closures import add_step_closure as _add_step_closure
from ..names import Names

_names = Names(__name__)

mark_step = _names.same(
    "mark_step",
    _mark_step,
    "`lazystep.mark_step`",
    "returns when the step is queued; raises errors of earlier steps",
)
add_step_closure = _names.same(
    "add_step_closure",
    _add_step_closure,
    "`lazystep.add_step_closure`; as a decorator, `step_closure`",
    "an async closure sees the values of its own step; no error is lost",
)
run_step_closures = _names.same(
    "run_step_closures",
    _run_step_closures,
    "`lazystep.run_step_closures`; `flush_step_closures` waits",
    "a closure that raises does not stop those behind it",
)
wait_device_ops = _names.same("wait_device_ops", _wait_device_ops, "`lazystep.wait_device_ops`")
sync_multi = _names.same("sync_multi", _sync_multi, "`lazystep.sync_multi`", "waits for the values")
get_tensor_id = _names.same("get_tensor_id", _get_tensor_id, "`lazystep.get_tensor_id`")
to_cpu = _names.same("to_cpu", _to_cpu, "`lazystep.to_cpu`", "other leaves than lazy tensors pass through")
save = _names.same("save", _save, "`lazystep.save`", "tensors that share memory share it in the file")

# `import torch._lazy` brings these modules along, so scripts use them without importing them. At the end:
# they take functions from above.
from . import closure as _closure  # noqa: E402
from . import device_context as _device_context  # noqa: E402

closure = _names.same("closure", _closure, "the same module")
device_context = _names.same("device_context", _device_context, "the same module")
