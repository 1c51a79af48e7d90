"""Everything that lazystep changes in torch.

Reading order: install, kernels, device_module, storage, cast_policies, autocast,
grad_scaler, tensor_methods, patches.
"""
