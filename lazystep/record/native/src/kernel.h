// Catching ops: one boxed kernel at the dispatch key `Lazy` for every op that needs one.
//
// The kernel looks the decision of the call up and records it. Everything else (a call that is new,
// random numbers, values, tensors of other devices) is Python's: see record/native/front_end.py.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace lazystep {

// What the kernel asks of Python. Set once, before any kernel is registered.
struct Python {
  py::object traits;    // op -> (mode, takes_number, float_literals, is_writing, needs_nbytes)
  py::object decide;    // op, args, kwargs -> the action's name and, to record, the Decision
  py::object dispatch;  // op, args, kwargs -> what the op returns
  py::object source;    // -> the user's line, or None
  py::object on_full;   // the recording has reached its size bound
  py::object on_draw;   // random numbers were drawn
};
void connect(Python python);

// Register the kernel for an op, and for every op that has no kernel of another kind.
void register_kernel(const std::string& name, const std::string& overload);
void register_fallback();
// Catch a composite that makes a compressed sparse tensor: it ends in a list of known devices.
void register_sparse_kernel(const std::string& name, const std::string& overload);

// While set, draws and allocations go to Python, whose handlers log them for capture.
void set_logging(bool is_on);

// From now on every op goes to Python, which raises: this is a forked child.
void refuse();

// Tell the lines of new entries, and cut a recording that is full. Runs Python.
struct Afterwards;
void after_recording(const Afterwards& afterwards);

// How often Python was called from a kernel.
uint64_t num_calls_to_python();

}  // namespace lazystep
