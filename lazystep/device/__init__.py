"""Everything that lazystep changes in torch.

Reading order: install, kernels, device_module, storage, tensor_methods, patches.
"""
