// Catching ops: one boxed kernel at the dispatch key `Lazy` for every op that needs one.
//
// The kernel looks up the decision of the call and records the op. It calls Python for everything else: a
// call that is new, draws of an observed call, values, tensors of other devices. See ops/dispatch.py.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace lazystep {

// What the kernel does with an op before it looks up a decision, or instead. Chosen by Python, per op.
enum class Mode {
  kRecord,     // nothing: look it up
  kHandler,    // Python has a handler for the op
  kComposite,  // Python takes the op apart, and autocast applies to the parts
  kDetach,     // another tensor for the same value
  kOverwrite,  // Python, if a failed step has left the first operand half updated; else look it up
  kEmpty,      // allocate on the host now
  kToCopy,     // copy from the host now; between lazy tensors look it up
};

// Set the object with the methods that the kernel calls: `Dispatch` in _recorder.pyi. Once, before any kernel
// is registered.
void install(const py::object& dispatch);
// The object that was installed.
py::object installed();

// Register the kernel for an op, and for every op that has no kernel of another kind.
void register_kernel(const std::string& name, const std::string& overload);
void register_fallback();
// Catch a composite that makes a compressed sparse tensor: it ends in a list of known devices.
void register_sparse_kernel(const std::string& name, const std::string& overload);

// From now on every op raises what `Dispatch.refuse` raises: this is a forked child.
void refuse();

// Whether a tensor is a view whose gradient would not be eager's. See [Note: stale views] in kernel.cpp.
bool is_stale_view(const at::Tensor& tensor);

// How often a kernel has called Python.
uint64_t num_calls_to_python();

}  // namespace lazystep
