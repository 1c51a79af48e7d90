// A call as the cache sees it: its key in words, its lazy operands, its numbers.
//
// The key holds everything that a decision depends on and nothing that varies. It is compared word
// by word, so each kind of argument begins with a word that no other kind begins with: an address
// for a lazy tensor, an odd number for the rest.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <memory>
#include <unordered_map>

#include "recorder.h"

namespace lazystep {

// What an op's schema says, told by Python once per op (`OpFacts`).
struct OpTraits {
  // The schema's. As in torch's own Python dispatch, arguments that have their default value at the
  // end of the positional ones, or by keyword, are left out: their numbers are no operands.
  const c10::FunctionSchema* schema = nullptr;
  size_t num_positional = 0;
  std::vector<bool> takes_number;  // by argument: Python numbers vary without another key
  bool float_literals = false;     // the result's size depends on the numbers themselves
  bool is_writing = false;
  bool needs_nbytes = false;  // the decision depends on the size of the memory behind a tensor
  bool is_absolute = false;   // and on the offset there
};

// How many of the positional arguments are given; and whether an argument is its default.
size_t num_given(const OpTraits& traits, c10::ArrayRef<c10::IValue> arguments);
bool is_default(const c10::Argument& argument, const c10::IValue& value);

class Call {
 public:
  // False if the key can't hold an argument: a tensor of another device, an object with a state.
  bool read(const OpTraits& traits, c10::ArrayRef<c10::IValue> arguments);
  size_t hash() const;

  c10::SmallVector<Word, 64> key;
  c10::SmallVector<LazyImpl*, 8> operands;
  c10::SmallVector<Number, 4> numbers;

 private:
  bool add(const c10::IValue& argument, bool is_number, bool float_literals);
  bool add_tensor(const at::Tensor& tensor, bool is_number, bool float_literals);
  void add_number(double number, bool is_literal);
  void add_shared_memory();

  bool is_absolute_ = false;
};

// A decision and the key that it was made for.
struct Line {
  enum Action {
    kRecord,  // append an instruction
    kDraw,    // draw on the host now
    kHost,    // run on the host now, in Python
  };
  std::vector<Word> key;
  std::vector<Ptr<Type>> types;  // keeps the addresses in `key` valid
  Action action = kHost;
  PyRef python;            // the `Decision` of decide/decision.py
  Ptr<Decision> decision;  // the same unpacked, if the action is kRecord
};

// The decisions of one op.
class Cache {
 public:
  // The line for exactly this call, or null. Any thread.
  std::shared_ptr<const Line> find(const Call& call, size_t hash);
  // Needs the GIL. `decision` is a Python `Decision`.
  std::shared_ptr<const Line> add(const Call& call, size_t hash, PyObject* decision);
  void clear();

 private:
  std::shared_ptr<const Line> find_locked(c10::ArrayRef<Word> key, size_t hash) const;

  std::mutex mutex_;
  std::unordered_multimap<size_t, std::shared_ptr<const Line>> lines_;
};

}  // namespace lazystep
