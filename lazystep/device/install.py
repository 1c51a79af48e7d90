"""`import lazystep` calls `install`, which lists everything that it registers and patches."""

from __future__ import annotations

import functools
import sys

from ..errors import LazyStepError
from ..record.recorder import Recorder
from . import autocast, device_module, grad_scaler, kernels, patches, tensor_methods


def install(recorder: Recorder) -> None:
    """Make `device="lazy"` known to torch, once per process. See `_install`."""
    _install(recorder)


@functools.cache  # a second time, after a reload of the package, would patch the patches
def _install(recorder: Recorder) -> None:
    """Everything that lazystep touches in torch; docs/concepts.md has the same list.

    Each change leaves tensors of other devices exactly as they were.
    """
    if "torch._lazy.ts_backend" in sys.modules:
        raise LazyStepError(
            "torch's own TorchScript lazy backend is loaded in this process and owns the lazy device. "
            "Use one or the other: remove `import torch._lazy.ts_backend`."
        )
    kernels.register(recorder)  # the dispatch keys Lazy, SparseLazy, SparseCsrLazy, AutogradLazy
    kernels.watch_new_kernels()  # torch.library.Library.impl
    device_module.register()  # torch.lazy
    autocast.extend_autocast()  # torch.autocast and its functions; the dispatch key AutocastXLA
    tensor_methods.replace_methods(recorder)  # torch.Tensor: methods that look at memory
    tensor_methods.replace_data()  # torch.Tensor.data
    patches.refuse_torch_compile()  # FakeTensorConverter.from_real_tensor
    patches.keep_identity_in_module_conversions()  # torch.nn.Module._apply and what it asks
    patches.materialize_on_the_lazy_device()  # UninitializedParameter.__new__, .materialize
    patches.refuse_backward_from_stale_views()  # torch.autograd._engine_run_backward
    patches.take_fast_paths()  # attention layers, torch.norm, linear cross entropy
    patches.prefer_lists_of_tensors()  # torch.optim's and clip_grad_norm_'s list of devices for foreach
    patches.allow_fused_optimizers()  # torch.optim's list of devices for fused=True
    grad_scaler.skip_updates_in_the_program()  # torch.amp.GradScaler.step
    patches.keep_step_counts_on_the_host()  # torch.optim.Optimizer.load_state_dict
    patches.record_distributed_data_parallel()  # DistributedDataParallel.__new__
    patches.end_steps_before_global_settings_change(recorder)  # torch.set_default_dtype and others
    patches.load_to_the_lazy_device()  # torch.serialization's packages
