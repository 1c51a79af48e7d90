"""`torch_xla.core`: its one module is xla_model."""
