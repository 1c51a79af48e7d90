"""`torch_xla.debug`: its one module is metrics."""
