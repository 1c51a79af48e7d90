"""`torch_xla.distributed`: its one module is parallel_loader."""
