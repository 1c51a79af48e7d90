"""Everything that lazystep changes in torch.

Reading order: install, kernels, device_module, tensor_methods, patches.
"""
