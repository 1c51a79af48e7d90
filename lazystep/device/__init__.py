"""Everything that lazystep changes in torch. Reading order: install, kernels, tensor_methods, patches."""
