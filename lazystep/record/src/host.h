// Ops that run on the host while recording, and whose results become inputs of the program:
// allocations, draws that depend on no value, copies from the host.
//
// The fast way of the handlers `_empty`, `draw` and `_to_copy` in ops/draws.py and ops/copies.py.
// What is not one of the common cases goes there.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "handle.h"

namespace lazystep {

// libgomp's function for the calling thread alone: see `serial_dispatch` in eager.py.
using SetNumThreads = void (*)(int);
void use_thread_setter(SetNumThreads function);

// Runs the op on the CPU with stand-ins for its lazy operands; `written` says that it writes the
// first one, which must be pristine. False, with the stack untouched, if this is not for us.
bool make_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool written, bool makes_pristine);

// A copy of a CPU tensor as a lazy one, for `_to_copy`. False as above.
bool copy_from_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The same without torch's dispatcher, for a plain, contiguous CPU tensor that wants no gradient; for any other
// an undefined tensor. The caller sees to it that no mode is on.
at::Tensor copy_plain_from_host(const at::Tensor& tensor);

}  // namespace lazystep
