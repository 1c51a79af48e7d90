"""`torch._lazy.tensor_factory_functions`: the functions of torch that make tensors."""

from torch._lazy.tensor_factory_functions import tensor_factory_functions as _functions

from ..names import Names

tensor_factory_functions = Names(__name__).same("tensor_factory_functions", _functions, "torch's own")
