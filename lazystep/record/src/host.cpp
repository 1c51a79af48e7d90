#include "host.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>

#include <cstring>

#include "modes.h"

namespace lazystep {

namespace {

using c10::IValue;
using torch::jit::Stack;

std::atomic<SetNumThreads> set_num_threads{nullptr};

// One thread for copies and draws: a second pool of OpenMP threads beside the executor's costs more.
class Serial {
 public:
  Serial() : function_(set_num_threads.load()), before_(at::get_num_threads()) {
    if (function_ != nullptr) function_(1);
  }
  ~Serial() {
    if (function_ != nullptr) function_(before_);
  }

 private:
  SetNumThreads function_;
  int before_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  NoModes no_modes_;
};

bool is_plain_cpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == c10::kStrided &&
      !tensor.key_set().has(c10::DispatchKey::Python) && !tensor.key_set().has(c10::DispatchKey::ZeroTensor) &&
      !tensor.is_quantized();
}

at::Tensor to_lazy(at::Tensor real, bool pristine) {
  auto memory = c10::make_intrusive<Memory>(static_cast<int64_t>(real.storage().nbytes()));
  auto handle = c10::make_intrusive<Handle>(type_of(real), std::move(memory));
  handle->tensor = std::move(real);
  handle->pristine = pristine;
  return make_tensor(std::move(handle));
}

// Whether the op has nothing but numbers, lazy tensors, and the lazy device or none among its arguments.
bool is_ours(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> values, bool written) {
  for (size_t i = 0; i < values.size(); ++i) {
    const IValue& value = values[i];
    if (value.isTensor()) {
      LazyImpl* lazy = value.toTensor().defined() ? as_lazy(value.toTensor().unsafeGetTensorImpl()) : nullptr;
      if (lazy == nullptr || (written && (i > 0 || !lazy->handle()->pristine))) return false;
    } else if (value.isTensorList() || value.isList()) {
      if (!value.isIntList()) return false;
    } else if (value.isDevice()) {
      if (value.toDevice().type() != c10::DeviceType::Lazy) return false;
    } else if (value.isInt() && schema.arguments()[i].name() == "layout") {
      if (static_cast<c10::Layout>(value.toInt()) != c10::Layout::Strided) return false;
    }
  }
  return schema.returns().size() == 1;
}

}  // namespace

void use_thread_setter(SetNumThreads function) { set_num_threads = function; }

bool make_on_host(const c10::OperatorHandle& op, Stack* stack, bool written, bool makes_pristine) {
  size_t count = op.schema().arguments().size();
  auto values = torch::jit::last(*stack, count);
  if (!is_ours(op.schema(), values, written)) return false;
  Serial serial;
  Stack call;
  call.reserve(count);
  for (const IValue& value : values) {
    if (value.isTensor()) {
      const Handle& lazy = *as_lazy(value.toTensor().unsafeGetTensorImpl())->handle();
      const Type& type = *lazy.type;
      call.emplace_back(
          written ? lazy.tensor : at::empty_strided(type.shape, type.stride, at::TensorOptions(type.dtype)));
    } else if (value.isDevice()) {
      call.emplace_back(c10::Device(c10::kCPU));
    } else {
      call.push_back(value);
    }
  }
  op.callBoxed(&call);
  at::Tensor result =
      written ? values[0].toTensor() : to_lazy(std::move(call.back()).toTensor(), makes_pristine);
  torch::jit::drop(*stack, count);
  stack->emplace_back(std::move(result));
  return true;
}

bool copy_from_host(const c10::OperatorHandle& op, Stack* stack) {
  size_t count = op.schema().arguments().size();
  auto values = torch::jit::last(*stack, count);
  // _to_copy(self, *, dtype, layout, device, pin_memory, non_blocking, memory_format)
  if (!values[0].isTensor() || !is_plain_cpu(values[0].toTensor())) return false;
  if (!values[3].isDevice() || values[3].toDevice().type() != c10::DeviceType::Lazy) return false;
  if (!values[2].isNone() && static_cast<c10::Layout>(values[2].toInt()) != c10::Layout::Strided) return false;
  Serial serial;
  Stack call(values.begin(), values.end());
  call[3] = c10::Device(c10::kCPU);
  call[5] = false;
  op.callBoxed(&call);
  at::Tensor result = to_lazy(std::move(call.back()).toTensor(), false);
  torch::jit::drop(*stack, count);
  stack->emplace_back(std::move(result));
  return true;
}

at::Tensor copy_plain_from_host(const at::Tensor& tensor) {
  if (!is_plain_cpu(tensor) || tensor.requires_grad() || !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg() ||
      tensor.is_inference()) {
    return {};
  }
  // With the strides of a dimension of size one as they are, as `_to_copy` has it.
  at::Tensor copy = at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.numel() > 0) std::memcpy(copy.data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  return to_lazy(std::move(copy), false);
}

}  // namespace lazystep
