// Autocast on lazy tensors: casts of operands by CPU's policy, above autograd.
//
// torch has no autocast for this device type. While autocast is on, the thread therefore lets every op pass the
// dispatch key `AutocastXLA`, and an op without a lazy tensor goes on untouched. The key is the thread's and not
// the tensor's, because the wrappers of torch.func would not have it: they copy the keys of a few devices only.
// They must be cast, too, or the cast happens below a transform and has no gradient there.
// See device/autocast.py for the switch, and device/cast_policies.py for where the policies come from.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace lazystep {

// Which type the floating operands of an op are cast to.
enum class CastTo {
  kLower,    // the type of autocast: bfloat16 or float16
  kPromote,  // float32 if one operand is float32, else the type of autocast
  kFixed,    // always the same: float32 for most
};

// Let ops without a policy pass. Once, before any lazy tensor is made.
void register_cast_fallback();
// Let the ops of this thread pass the key, or not any more.
void include_casts(bool is_on);
// From now on, autocast casts the operands of this op. `fixed` is the type of kFixed.
void register_cast(const std::string& name, const std::string& overload, CastTo to, at::ScalarType fixed);

// The tensor in the type of autocast. The cast of a leaf that requires gradients is kept until `clear_casts`,
// as eager keeps it.
at::Tensor cast_to_lower(const at::Tensor& tensor);
// Forget all casts that were kept. Any thread; they are those of all threads, as in eager.
void clear_casts();
// How many are kept.
size_t num_casts();
// Whether casts of an op now may come from, or go to, somebody outside: 1 if a block is open in this thread, which
// keeps the casts of blocks inside it also if it is switched off, and 2 if some thread has kept a cast.
int casts_around();

// Whether autocast is on for CPU tensors of this thread, and off for lazy ones: somebody went past
// device/autocast.py.
bool is_autocast_out_of_step();

}  // namespace lazystep
