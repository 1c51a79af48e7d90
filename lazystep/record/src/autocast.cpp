#include "autocast.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace lazystep {

namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

constexpr c10::DispatchKeySet kCpuKey(c10::DispatchKey::AutocastCPU);
constexpr c10::DispatchKeySet kLazyKey(c10::DispatchKey::AutocastXLA);

// A kept cast, by the impl of its source. The weak reference keeps the address from being used again.
// The type is no part of the key, in eager neither: inside a block of one type, a nested block of another
// type gets the kept cast.
using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using Casts = std::unordered_map<c10::TensorImpl*, std::pair<Weak, at::Tensor>>;

std::mutex& mutex() {
  static auto* instance = new std::mutex;
  return *instance;
}

// Under the mutex. No tensor is made or dropped while it is held.
Casts& casts() {
  static auto* instance = new Casts;  // never destroyed: its tensors would need the interpreter
  return *instance;
}

bool is_on_lazy_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::Lazy;
}

bool is_ours(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_floating_point()) return false;
  auto device = tensor.device().type();
  // A CPU tensor may stand beside lazy ones if it has no dimension. Eager casts it, too.
  return device == c10::DeviceType::Lazy || device == c10::DeviceType::CPU;
}

bool is_kept(const at::Tensor& tensor, at::ScalarType to) {
  return to == at::autocast::get_autocast_dtype(at::kCPU) && tensor.scalar_type() == at::kFloat &&
      tensor.requires_grad() && tensor.is_leaf() && !tensor.is_view() && at::autocast::is_autocast_cache_enabled() &&
      !c10::InferenceMode::is_enabled();
}

at::Tensor cast(const at::Tensor& tensor, at::ScalarType to) {
  if (!is_ours(tensor) || tensor.scalar_type() == at::kDouble || tensor.scalar_type() == to) return tensor;
  if (!is_kept(tensor, to)) return tensor.to(to);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  {
    std::lock_guard lock(mutex());
    auto found = casts().find(impl);
    if (found != casts().end()) return found->second.second;
  }
  // A use under `no_grad` may come first, and a use that wants gradients gets the same cast. Eager does this, too.
  c10::AutoGradMode with_grad(true);
  at::Tensor made = tensor.to(to);
  Weak weak(tensor.getIntrusivePtr());
  std::lock_guard lock(mutex());
  // Another thread may have been faster.
  return casts().try_emplace(impl, std::move(weak), made).first->second.second;
}

// The wider of `current` and the type of a tensor.
at::ScalarType promote(at::ScalarType current, const at::Tensor& tensor, at::ScalarType lower) {
  if (!is_ours(tensor) || tensor.scalar_type() == at::kDouble) return current;
  auto next = tensor.scalar_type();
  if (current == at::kFloat || next == at::kFloat) return at::kFloat;
  TORCH_CHECK(
      next == lower, "autocast to ", lower, " can't promote a tensor of type ", next, ": cast it to float32 or ", lower);
  return current;
}

template <typename Function>
void for_each_tensor(c10::ArrayRef<IValue> values, const Function& function) {
  for (const IValue& value : values) {
    if (value.isTensor()) {
      function(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) function(tensor);
    }
  }
}

bool has_lazy(c10::ArrayRef<IValue> values) {
  for (const IValue& value : values) {
    if (value.isTensor()) {
      if (is_on_lazy_device(value.toTensor())) return true;
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (is_on_lazy_device(tensor)) return true;
      }
    }
  }
  return false;
}

// From the last argument to the first, as eager's kernels are compiled. Backward goes through the casts in the
// opposite order, so this is the order in which parameters get their gradients, and DDP fills its buckets.
void cast_all(Stack* stack, size_t count, at::ScalarType to) {
  for (size_t back = 1; back <= count; ++back) {
    IValue& value = (*stack)[stack->size() - back];
    if (value.isTensor()) {
      value = cast(value.toTensor(), to);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = cast(tensor, to);
      value = std::move(tensors);
    }
  }
}

struct CastKernel final : c10::OperatorKernel {
  CastKernel(CastTo to, at::ScalarType fixed) : to(to), fixed(fixed) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    size_t count = op.schema().arguments().size();
    // Off for the CPU but on here: inside a kernel of CPU's autocast, which has cast already, or under
    // `torch.autocast("xla")`, which is not meant for this device.
    bool is_on = at::autocast::is_autocast_enabled(at::kCPU) && has_lazy(torch::jit::last(*stack, count));
    // Without a lazy tensor, CPU's own kernel comes next.
    c10::impl::ExcludeDispatchKeyGuard no_autocast(is_on ? kCpuKey | kLazyKey : kLazyKey);
    if (is_on) {
      auto lower = at::autocast::get_autocast_dtype(at::kCPU);
      auto type = to == CastTo::kFixed ? fixed : lower;
      if (to == CastTo::kPromote) {
        for_each_tensor(
            torch::jit::last(*stack, count), [&](const at::Tensor& tensor) { type = promote(type, tensor, lower); });
      }
      cast_all(stack, count, type);
    }
    op.callBoxed(stack);
  }

  CastTo to;
  at::ScalarType fixed;
};

// Registrations last as long as the process.
void keep_cast(c10::RegistrationHandleRAII handle) {
  static auto* handles = new std::vector<c10::RegistrationHandleRAII>;
  handles->push_back(std::move(handle));
}

}  // namespace

void register_cast_fallback() {
  keep_cast(c10::Dispatcher::singleton().registerFallback(
      c10::DispatchKey::AutocastXLA, c10::KernelFunction::makeFallthrough(), "lazystep"));
}

void include_casts(bool is_on) {
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::AutocastXLA, is_on);
}

void register_cast(const std::string& name, const std::string& overload, CastTo to, at::ScalarType fixed) {
  auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<CastKernel>(to, fixed));
  keep_cast(c10::Dispatcher::singleton().registerImpl(
      {name, overload}, c10::DispatchKey::AutocastXLA, std::move(kernel), std::nullopt, nullptr, "lazystep"));
}

at::Tensor cast_to_lower(const at::Tensor& tensor) {
  auto lower = at::autocast::get_autocast_dtype(at::kCPU);
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kCpuKey | kLazyKey);
  return cast(tensor, lower);
}

void clear_casts() {
  Casts dropped;
  std::lock_guard lock(mutex());
  dropped.swap(casts());
}

size_t num_casts() {
  std::lock_guard lock(mutex());
  return casts().size();
}

int casts_around() {
  // torch has no question for the depth.
  bool is_nested = at::autocast::increment_nesting() > 1;
  at::autocast::decrement_nesting();
  return (is_nested ? 1 : 0) | (num_casts() > 0 ? 2 : 0);
}

bool is_autocast_out_of_step() {
  auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return !excluded.has(c10::DispatchKey::AutocastCPU) && excluded.has(c10::DispatchKey::AutocastXLA);
}

}  // namespace lazystep
