// The instructions of a program, run one after the other without the interpreter lock.
//
// The training thread records the next step meanwhile. If each op gave the lock up and took it again, both threads would
// wait for each other at every op: two handovers for some microseconds of computation. So a run takes the lock for its
// inputs and numbers, then for nothing but the rare calls of Python that the program needs between two ops.
//
// Arguments are converted to what the dispatcher takes when the sequence is made. Only numbers are converted in each run.
//
// Each result is compared with what was inferred for it when its op was recorded: its type, and whose memory it has. That
// takes some nanoseconds. A result that differs goes to a Python function, which mends it or raises.
//
// What a kernel warns of goes to the handler around the run, which writes it to standard error on the executor thread.
// Calls of ops from Python do not leave it to that handler: since torch 2.15 they make Python warnings at once. Where a
// filter makes these errors, a step would fail in the background for a warning that was given when its op was recorded.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lazystep {

namespace py = pybind11;

// Values are tensors in registers. A register is emptied after the last instruction that uses its value.
class OpSequence {
 public:
  // `ref`, `scalar_ref`: the classes of arguments that are values, and that are numbers of a run.
  OpSequence(
      py::object ref, py::object scalar_ref, size_t num_registers, std::vector<size_t> inputs,
      std::vector<size_t> outputs, std::vector<size_t> unused)
      : ref_(std::move(ref)),
        scalar_ref_(std::move(scalar_ref)),
        num_registers_(num_registers),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)),
        unused_(std::move(unused)) {}

  // Add a call of an op of torch. `position`: of its instruction. `results`: a register for each tensor that it
  // returns, -1 for one that is not needed. `reads`: the registers of its arguments. `dead`: registers that are emptied
  // afterwards.
  void add_op(
      size_t position, const std::string& name, const std::string& overload, const py::sequence& args,
      const py::dict& kwargs, std::vector<int64_t> results, std::vector<size_t> reads, std::vector<size_t> dead) {
    Step step{position, c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())};
    const auto& schema = step.op.schema();
    TORCH_INTERNAL_ASSERT(args.size() <= schema.arguments().size());
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& parameter = schema.arguments()[i];
      if (i < args.size()) {
        step.arguments.push_back(plan(args[i], schema, i));
      } else if (kwargs.contains(parameter.name().c_str())) {
        step.arguments.push_back(plan(kwargs[parameter.name().c_str()], schema, i));
      } else {
        TORCH_INTERNAL_ASSERT(parameter.default_value().has_value());
        step.arguments.push_back({.kind = Kind::kLiteral, .literal = *parameter.default_value()});
      }
    }
    step.results = std::move(results);
    step.reads = std::move(reads);
    step.dead = std::move(dead);
    steps_.push_back(std::move(step));
  }

  // The type of a register after the op that was added last, and the registers of which it is a view; a result that is
  // no view of any has memory that no argument has. `mend(tensor, is_view, is_shared)` is called where that does not
  // hold, and returns the tensor to take: `is_view` tells whether the tensor has the memory of one of `viewed`, and
  // `is_shared` whether it has the memory of an argument.
  void expect(
      size_t at, py::object dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t offset, bool is_conj,
      bool is_neg, std::vector<size_t> viewed, py::function mend) {
    steps_.back().expected.push_back(
        {at, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type, std::move(sizes), std::move(strides), offset,
         is_conj, is_neg, std::move(viewed), std::move(mend)});
  }

  // Run everything once and return the outputs. Empties `inputs`. An exception is the op's own; `position` and
  // `has_begun` then tell where it was. Needs the interpreter lock, and gives it up.
  std::vector<at::Tensor> run(const py::list& inputs, const py::sequence& scalars) {
    std::vector<at::Tensor> registers(num_registers_);
    TORCH_INTERNAL_ASSERT(inputs.size() == inputs_.size());
    for (size_t i = 0; i < inputs_.size(); ++i) registers[inputs_[i]] = py::cast<at::Tensor>(inputs[i]);
    inputs.attr("clear")();
    has_begun_ = false;
    const std::vector<c10::IValue> numbers = convert(scalars);
    has_begun_ = true;
    std::vector<at::Tensor> outputs;
    const py::gil_scoped_release no_lock;
    for (size_t unused : unused_) registers[unused].reset();
    torch::jit::Stack stack;
    for (const Step& step : steps_) {
      position_ = step.position;
      stack.clear();
      for (const Argument& argument : step.arguments) stack.push_back(fill(argument, registers, numbers));
      step.op.callBoxed(stack);
      store(step, stack, registers);
      if (!step.expected.empty()) compare(step, registers);
      for (size_t dead : step.dead) registers[dead].reset();
    }
    stack.clear();
    for (size_t output : outputs_) outputs.push_back(registers[output]);
    return outputs;
  }

  // The instruction that the last run has come to, and whether that run has begun to compute.
  size_t position() const { return position_; }
  bool has_begun() const { return has_begun_; }

 private:
  enum class Kind {
    kLiteral,  // the same in all runs
    kTensor,  // in a register
    kNumber,  // converted at the start of a run
    kList,  // of arguments, some of which are tensors
  };

  struct Argument {
    Kind kind;
    c10::IValue literal{};
    size_t index = 0;  // of the register, or among the numbers
    c10::TypePtr element_type{};
    std::vector<Argument> elements{};
  };

  // What is converted in each run: a number of the run, or a list with some, as the schema's type.
  struct Number {
    py::object source;
    c10::TypePtr type;
    std::optional<int32_t> num_elements;
    size_t position;
  };

  // What was inferred for a register. See `expect`.
  struct Expected {
    size_t at;
    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    bool is_conj, is_neg;
    std::vector<size_t> viewed;
    py::function mend;

    bool is_type_of(const at::Tensor& tensor) const {
      return tensor.scalar_type() == dtype && tensor.layout() == at::kStrided && tensor.sizes() == sizes &&
          tensor.strides() == strides && tensor.storage_offset() == offset && tensor.is_conj() == is_conj &&
          tensor.is_neg() == is_neg;
    }
  };

  struct Step {
    size_t position;
    c10::OperatorHandle op;
    std::vector<Argument> arguments{};
    std::vector<int64_t> results{};
    std::vector<Expected> expected{};
    std::vector<size_t> reads{};
    std::vector<size_t> dead{};
  };

  // Whether an argument is of this class, or has one that is.
  static bool has_any(py::handle object, const py::object& kind) {
    if (py::type::handle_of(object).is(kind)) return true;
    if (!PyTuple_CheckExact(object.ptr())) return false;
    for (py::handle element : py::reinterpret_borrow<py::tuple>(object)) {
      if (has_any(element, kind)) return true;
    }
    return false;
  }

  // An argument as a call from Python has it: with the numbers of a run, and with lists where the program has tuples.
  py::object spell(py::handle object, const py::sequence& scalars) const {
    if (py::type::handle_of(object).is(scalar_ref_)) return scalars[py::cast<size_t>(object[py::int_(0)])];
    if (!PyTuple_CheckExact(object.ptr())) return py::reinterpret_borrow<py::object>(object);
    py::list found;
    for (py::handle element : py::reinterpret_borrow<py::tuple>(object)) found.append(spell(element, scalars));
    return found;
  }

  Argument plan(py::handle object, const c10::FunctionSchema& schema, size_t at) {
    const auto& parameter = schema.arguments()[at];
    if (has_any(object, ref_)) return plan_tensors(object, parameter.real_type());
    if (!has_any(object, scalar_ref_)) {
      const torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
      auto literal = torch::jit::argumentToIValue(schema, at, spell(object, py::tuple()));
      // A number where the op takes a tensor becomes a new tensor in each run: an op may return a view of it.
      if (!literal.isTensor() && !literal.isTensorList()) return {.kind = Kind::kLiteral, .literal = literal};
    }
    return plan_number(object, parameter.real_type(), parameter.N());
  }

  Argument plan_tensors(py::handle object, const c10::TypePtr& type) {
    if (py::type::handle_of(object).is(ref_)) {
      return {.kind = Kind::kTensor, .index = py::cast<size_t>(object[py::int_(0)])};
    }
    if (!PyTuple_CheckExact(object.ptr())) return plan_number(object, type, std::nullopt);
    const auto* optional = type->castRaw<c10::OptionalType>();
    const auto* list = (optional != nullptr ? optional->getElementType() : type)->castRaw<c10::ListType>();
    TORCH_INTERNAL_ASSERT(list != nullptr);
    Argument found{.kind = Kind::kList, .element_type = list->getElementType()};
    for (py::handle element : py::reinterpret_borrow<py::tuple>(object)) {
      found.elements.push_back(plan_tensors(element, found.element_type));
    }
    return found;
  }

  Argument plan_number(py::handle object, const c10::TypePtr& type, std::optional<int32_t> num_elements) {
    numbers_.push_back({py::reinterpret_borrow<py::object>(object), type, num_elements, steps_.size()});
    return {.kind = Kind::kNumber, .index = numbers_.size() - 1};
  }

  std::vector<c10::IValue> convert(const py::sequence& scalars) {
    const torch::jit::ToIValueAllowNumbersAsTensors allowed(true);
    std::vector<c10::IValue> found;
    found.reserve(numbers_.size());
    for (const Number& number : numbers_) {
      position_ = steps_[number.position].position;
      const py::object object = spell(number.source, scalars);
      found.push_back(torch::jit::toIValue(object, number.type, number.num_elements));
    }
    return found;
  }

  static c10::IValue fill(
      const Argument& argument, const std::vector<at::Tensor>& registers, const std::vector<c10::IValue>& numbers) {
    switch (argument.kind) {
      case Kind::kTensor: return registers[argument.index];
      case Kind::kNumber: return numbers[argument.index];
      case Kind::kLiteral: return argument.literal;
      case Kind::kList: break;
    }
    c10::impl::GenericList list(argument.element_type);
    list.reserve(argument.elements.size());
    for (const Argument& element : argument.elements) list.push_back(fill(element, registers, numbers));
    return list;
  }

  // The tensors that an op has returned: one by one, or in one list.
  static void store(const Step& step, torch::jit::Stack& stack, std::vector<at::Tensor>& registers) {
    auto put = [&](size_t number, at::Tensor tensor) {
      if (step.results[number] >= 0) registers[step.results[number]] = std::move(tensor);
    };
    if (stack.size() == 1 && stack[0].isTensorList()) {
      auto tensors = stack[0].toTensorVector();
      TORCH_INTERNAL_ASSERT(tensors.size() == step.results.size());
      for (size_t i = 0; i < tensors.size(); ++i) put(i, std::move(tensors[i]));
      return;
    }
    for (size_t i = 0; i < step.results.size() && i < stack.size(); ++i) {
      if (step.results[i] >= 0) put(i, std::move(stack[i]).toTensor());
    }
  }

  static const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
    return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  }

  // Compare the results of an op with what was inferred for them.
  static void compare(const Step& step, std::vector<at::Tensor>& registers) {
    std::vector<const c10::StorageImpl*> taken;  // sorted, because ops on lists have many arguments and results
    taken.reserve(step.reads.size());
    for (size_t read : step.reads) taken.push_back(memory_of(registers[read]));
    std::sort(taken.begin(), taken.end());
    for (const Expected& expected : step.expected) {
      at::Tensor& tensor = registers[expected.at];
      const auto* memory = memory_of(tensor);
      const bool is_view = std::any_of(expected.viewed.begin(), expected.viewed.end(), [&](size_t viewed) {
        return memory_of(registers[viewed]) == memory;
      });
      const bool is_shared = std::binary_search(taken.begin(), taken.end(), memory);
      if (expected.is_type_of(tensor) && (expected.viewed.empty() ? !is_shared : is_view)) continue;
      const py::gil_scoped_acquire lock;
      tensor = py::cast<at::Tensor>(expected.mend(tensor, is_view, is_shared));
    }
  }

  py::object ref_, scalar_ref_;
  size_t num_registers_;
  std::vector<size_t> inputs_, outputs_, unused_;
  std::vector<Number> numbers_;
  std::vector<Step> steps_;
  size_t position_ = 0;
  bool has_begun_ = false;
};

}  // namespace lazystep
