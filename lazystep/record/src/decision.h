// A decision of decide/decision.py, unpacked: all that is needed to record the op without Python.
#pragma once

#include <atomic>
#include <complex>
#include <cstdint>
#include <memory>
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
  std::vector<int64_t> offsets;  // of its operands when it was made: see [Note: offsets] in recorder.h
  Structure structure = kOne;
  // [Note: numbers] Numbers are in no key, and an op may take some numbers and not others: 300 is no
  // int8, and an integer has no power of -1. So Python tries the op again (`check_numbers`) for a
  // number of a new kind: of another sign, infinite, or not within `range`. `kinds` are the kinds
  // that have been tried, by the number's position.
  std::pair<double, double> range;
  std::unique_ptr<std::atomic<uint8_t>[]> kinds;
  size_t num_numbers = 0;

  // Whether numbers of these kinds have been tried.
  bool has_tried(c10::ArrayRef<Number> numbers) const;
  void set_tried(c10::ArrayRef<Number> numbers) const;

  ~Decision() override;
};

// The decision of a Python `Decision` with the action RECORD. Needs the GIL.
Ptr<Decision> decision_from_python(PyObject* decision);

}  // namespace lazystep
