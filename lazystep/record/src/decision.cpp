#include "decision.h"

#include <torch/csrc/utils/pybind.h>

#include <unordered_map>

namespace lazystep {

namespace {

// As for types: one per Python object, weak, under the GIL.
std::unordered_map<PyObject*, Decision*>& decisions() {
  static auto* table = new std::unordered_map<PyObject*, Decision*>;
  return *table;
}

}  // namespace

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
  auto structure = object.attr("structure").cast<std::string>();
  decision->structure = structure == "one"   ? Decision::kOne
                        : structure == "tuple" ? Decision::kTuple
                                               : Decision::kList;
  decisions()[python] = decision.get();
  return decision;
}

}  // namespace lazystep
