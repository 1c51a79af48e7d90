"""What happens to an op that is not simply recorded: draws, copies, reads, tensors of other devices.

The recorder calls `dispatch.OpDispatch`; torch calls the kernels of `cpu_branch` above autograd. Reading
order: handlers, dispatch, host, draws, drawn_by_value, copies, collectives, mixed, cpu_branch, facade,
sparse.
"""
