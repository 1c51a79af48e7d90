#include "decision.h"

#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <unordered_map>

namespace lazystep {

namespace {

// As for types: one per Python object, weak, under the GIL.
std::unordered_map<PyObject*, Decision*>& decisions() {
  static auto* table = new std::unordered_map<PyObject*, Decision*>;
  return *table;
}

// Kinds of numbers: a bit each. A number outside of the range is of no kind that is ever marked as tried.
enum Kind : uint8_t { kOutside = 0, kNegative = 1, kZero = 2, kPositive = 4, kNan = 8, kInfinite = 16 };

uint8_t kind_of(double number, const std::pair<double, double>& range) {
  if (number > 0) return number <= range.second ? kPositive : std::isinf(number) ? kInfinite : kOutside;
  if (number < 0) return number >= range.first ? kNegative : std::isinf(number) ? kInfinite : kOutside;
  return number == 0 ? kZero : kNan;
}

uint8_t kind_of(const Number& number, const std::pair<double, double>& range) {
  if (const double* real = std::get_if<double>(&number)) return kind_of(*real, range);
  if (const int64_t* integer = std::get_if<int64_t>(&number)) {
    return kind_of(static_cast<double>(*integer), range);
  }
  const auto& complex = std::get<c10::complex<double>>(number);
  return kind_of(std::max(std::abs(complex.real()), std::abs(complex.imag())), range);
}

}  // namespace

bool Decision::has_tried(c10::ArrayRef<Number> numbers) const {
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (!(kinds[i].load(std::memory_order_relaxed) & kind_of(numbers[i], range))) return false;
  }
  return true;
}

void Decision::set_tried(c10::ArrayRef<Number> numbers) const {
  for (size_t i = 0; i < numbers.size(); ++i) kinds[i] |= kind_of(numbers[i], range);
}

Decision::~Decision() {
  if (!python || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  auto found = decisions().find(python.get());
  if (found != decisions().end() && found->second == this) decisions().erase(found);
}

Ptr<Decision> decision_from_python(PyObject* python) {
  auto found = decisions().find(python);
  if (found != decisions().end()) {
    auto weak = c10::weak_intrusive_ptr<Decision>::reclaim_copy(found->second);
    if (auto strong = weak.lock()) return strong;
  }
  auto object = py::reinterpret_borrow<py::object>(python);
  auto decision = c10::make_intrusive<Decision>();
  decision->python = PyRef::borrow(python);
  for (auto made : object.attr("made")) {
    auto parts = made.cast<py::tuple>();
    decision->made.push_back(
        {type_from_python(parts[0].ptr()), parts[1].cast<int64_t>(), parts[2].cast<int64_t>()});
  }
  int64_t num_new = 0;
  for (auto result : object.attr("results")) {
    if (result.is_none()) {
      decision->results.push_back({Decision::Result::kNone, -1});
    } else if (auto same = result.attr("same").cast<int64_t>(); same >= 0) {
      decision->results.push_back({Decision::Result::kOperand, same});
    } else {
      decision->results.push_back({Decision::Result::kMade, num_new++});
    }
  }
  for (auto rebind : object.attr("rebinds")) {
    decision->rebinds.push_back(rebind.attr("operand").cast<int64_t>());
  }
  for (auto operand : object.attr("writes")) decision->writes.push_back(operand.cast<int64_t>());
  decision->offsets = object.attr("offsets").cast<std::vector<int64_t>>();
  decision->range = object.attr("range").cast<std::pair<double, double>>();
  decision->num_numbers = py::len(object.attr("scalar_types"));
  decision->kinds = std::make_unique<std::atomic<uint8_t>[]>(decision->num_numbers);
  auto structure = object.attr("structure").cast<std::string>();
  decision->structure = structure == "one"   ? Decision::kOne
                        : structure == "tuple" ? Decision::kTuple
                                               : Decision::kList;
  decisions()[python] = decision.get();
  return decision;
}

}  // namespace lazystep
