// Modes that a user's code may have switched on around an op, and that end at the recorder.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace lazystep {

// Inside its life, ops on CPU tensors are not cast by autocast, and Python calls reach no
// `__torch_function__`. A decision is kept for later calls outside the user's block, and what it
// records runs on the executor thread, which has no modes. Dispatch modes need no guard: torch has
// taken every one of them off its stack before a kernel runs.
class NoModes {
 public:
  // `keep_autocast`: for an op that is taken apart into ops that autocast may cast.
  explicit NoModes(bool keep_autocast = false) : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    if (!keep_autocast) no_autocast_.emplace(c10::autocast_dispatch_keyset);
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~NoModes() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }
  NoModes(const NoModes&) = delete;
  NoModes& operator=(const NoModes&) = delete;

 private:
  at::impl::TorchFunctionDisabledState before_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast_;
};

}  // namespace lazystep
