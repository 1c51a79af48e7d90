// A call of one of torch's fused optimizers inside of a library, for the op lazystep::update.
//
// The text, as words with spaces between them (written by compile/fused.py):
//   fused, the op's name, its overload or "-", arguments; for each argument one of
//     L number indices   tensors          C number indices   copies of tensors
//     T index            a tensor         N                  none
//     F source index     a number: see update.h               B 0 or 1
// An index counts the written tensors, then the others.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace lazystep {

inline bool is_fused_call(c10::string_view text) { return text.substr(0, 6) == "fused "; }

inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

class FusedCall {
 public:
  FusedCall(const std::string& text, std::function<const at::Tensor&(int64_t)> tensor_at,
            std::function<double(int, int64_t)> number_at)
      : words_(text), tensor_at_(std::move(tensor_at)), number_at_(std::move(number_at)) {}

  void run() {
    next<std::string>();  // "fused"
    const auto name = next<std::string>();
    auto overload = next<std::string>();
    TORCH_CHECK(name.rfind("_fused_", 0) == 0, "lazystep::update: the code is damaged");
    if (overload == "-") overload.clear();
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name).c_str(), overload.c_str());
    const auto num_arguments = next<int64_t>();
    TORCH_CHECK(num_arguments == static_cast<int64_t>(op.schema().arguments().size()),
                "lazystep::update: the code is damaged");
    torch::jit::Stack stack;
    for (int64_t n = 0; n < num_arguments; ++n) stack.push_back(argument());
    op.callBoxed(&stack);
  }

 private:
  template <typename T>
  T next() {
    T value;
    TORCH_CHECK(words_ >> value, "lazystep::update: the code is damaged");
    return value;
  }

  c10::IValue argument() {
    const auto kind = next<std::string>();
    if (kind == "L" || kind == "C") return list(kind == "C");
    if (kind == "T") return tensor_at_(next<int64_t>());
    if (kind == "N") return {};
    if (kind == "B") return next<int64_t>() != 0;
    TORCH_CHECK(kind == "F", "lazystep::update: the code is damaged");
    const auto source = next<int>();
    if (source == 3) return std::strtod(next<std::string>().c_str(), nullptr);
    return number_at_(source, next<int64_t>());
  }

  // The kernels walk over memory: tensors of other strides would be mixed up without an error.
  c10::IValue list(bool is_copied) {
    c10::List<at::Tensor> tensors;
    const auto size = next<int64_t>();
    for (int64_t n = 0; n < size; ++n) {
      const at::Tensor& tensor = tensor_at_(next<int64_t>());
      if (static_cast<int64_t>(first_.size()) <= n) first_.push_back(tensor);
      TORCH_CHECK((tensor.numel() == 1 || same_layout(tensor, first_[n])) && tensor.is_non_overlapping_and_dense(),
                  "lazystep::update: the tensors of a parameter differ in their layout");
      tensors.push_back(is_copied ? tensor.clone() : tensor);
    }
    return tensors;
  }

  std::istringstream words_;
  std::function<const at::Tensor&(int64_t)> tensor_at_;
  std::function<double(int, int64_t)> number_at_;
  std::vector<at::Tensor> first_;  // the parameters
};

}  // namespace lazystep
