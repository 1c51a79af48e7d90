// An op of torch as a Python function that leaves a kernel's warnings to whoever calls.
//
// `OpOverload._op` is the same call. But since torch 2.15 it turns what a kernel warns of into Python warnings at
// once. On the executor thread nobody sees them, and where a filter makes them errors, a step would fail in the
// background because of a warning that was given when its op was recorded. Here they go to the handler around the
// call, as they do in earlier releases: on the executor thread that one writes them to standard error.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <string>
#include <utility>

namespace lazystep {

inline pybind11::cpp_function operation(const std::string& name, const std::string& overload) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  return pybind11::cpp_function([handle](const pybind11::args& args, const pybind11::kwargs& kwargs) {
    torch::jit::Stack stack;
    {
      // A program's numbers may stand where the schema has a tensor, as in `x * 0.5`.
      const torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
      stack = torch::jit::createStackForSchema(handle.schema(), args, kwargs, std::nullopt);
    }
    {
      const pybind11::gil_scoped_release no_lock;
      handle.callBoxed(stack);
    }
    return torch::jit::createPyObjectForStack(std::move(stack));
  });
}

}  // namespace lazystep
