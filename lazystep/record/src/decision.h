// A decision of record/decide.py, unpacked: all that is needed to record the op without Python.
#pragma once

#include <complex>
#include <cstdint>
#include <variant>
#include <vector>

#include "handle.h"

namespace lazystep {

// A Python number that varies without making another program.
using Number = std::variant<double, int64_t, c10::complex<double>>;

struct Decision : c10::intrusive_ptr_target {
  // A value that the op makes. `alias`: the operand whose memory it shares; below zero, new memory:
  // values with the same negative number share it.
  struct Made {
    Ptr<Type> type;
    int64_t alias;
    int64_t nbytes;
  };
  // What the op returns in one place: nothing, an operand, or a value that it makes.
  struct Result {
    enum Kind { kNone, kOperand, kMade } kind;
    int64_t number;
  };
  enum Structure { kOne, kTuple, kList };

  PyRef python;
  std::vector<Made> made;       // new results first, then what rebound operands become
  std::vector<Result> results;
  std::vector<int64_t> rebinds;  // operands whose metadata the op changes
  std::vector<int64_t> writes;   // operands that the op writes
  Structure structure = kOne;

  ~Decision() override;
};

// The decision of a Python `Decision` with the action RECORD. Needs the GIL.
Ptr<Decision> decision_from_python(PyObject* decision);

}  // namespace lazystep
