// What a replay of a captured step does in C++: it looks at the step's tensors, and binds its program to them.
//
// [Note: cold memory] Besides a running step the processor's caches are cold, and waiting for memory is most of
// a replay. So a replay touches few lines: what is shared by all replays is shared (`State::Bound`), not copied,
// and addresses that are known in advance are asked for all at once before the first is looked at.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "cut.h"

namespace lazystep {

// A byte of `gradient_flags`.
enum Flag : uint8_t { kWantsGradient = 1, kHasGradient = 2, kHasHooks = 4, kHasLaterHooks = 8, kIsNoLeaf = 16 };
uint8_t gradient_flags_of(const at::Tensor& tensor);

// torch's modes as a number, if all of them are of a kind that a number can hold; -1 if a mode is on that is an
// object (a torch function mode, a dispatch mode, hooks of saved tensors).
int64_t plain_modes();
// The same for all modes that are no objects: settings, included and excluded dispatch keys. See [Note: modes].
py::tuple settings_and_keys();

// The fast way of `take_apart` and `kind_of` in capture/arguments.py: the leaves of a call and their kind, if all
// arguments are plain; None otherwise.
py::object take_arguments(const py::tuple& arguments);

// The flags that tensors had when a step was captured. `ignored`: bits that do not count.
class TensorFlags {
 public:
  TensorFlags(std::vector<size_t> positions, const std::string& flags, const std::string& ignored);
  // Whether the tensors at these positions have the same flags now.
  bool hold(const py::list& values) const;

 private:
  struct Expected {
    size_t position;
    uint8_t flags, counted;
  };
  std::vector<Expected> expected_;
  size_t size_ = 0;  // that the list must have at least
};

// The storages of a program: those of its inputs and outputs, and those that it writes.
struct Layout {
  struct Output {
    Ptr<Type> type;
    int64_t number;
    int64_t nbytes;
  };

  Layout(std::vector<int64_t> inputs, const std::vector<std::tuple<py::object, int64_t, int64_t>>& outputs,
         std::vector<int64_t> written);

  std::vector<int64_t> inputs;
  std::vector<Output> outputs;
  std::vector<int64_t> written;
  int64_t num_storages = 0;
};

// An input that each replay has its own of: its position and its handle.
using Given = std::vector<std::pair<size_t, Ptr<Handle>>>;

// The state of a captured step: the lazy tensors that it finds in places, and the handles that they had at the
// last replay. Belongs to the GIL.
class State {
 public:
  // What all replays on the same handles share.
  struct Bound {
    std::vector<Ptr<Handle>> inputs;  // by position, null for a given one
    std::vector<Ptr<Memory>> memories;  // by storage number, null if it is no state
    std::unordered_set<const Memory*> known;
    bool has_offset = false;  // an input does not begin where its memory does
    std::shared_ptr<Written> written;  // as far as it is state
    // [Note: one box] All memory that the step writes has the same box with the last run in it, so that one
    // assignment tells all of it which run comes next. This is so while the box is in `num_boxed` places.
    Ptr<PyBox> box;
    int64_t num_boxed = 0;
    int64_t num_damages = -1;  // that had happened when none of the memory was found damaged
  };

  // `tensors`: positions of the tensors among the values that a replay reads. `arguments`: the position of an
  // input of the program, and the number of the leaf that it is.
  State(
      Layout layout, std::vector<size_t> tensors,
      std::vector<std::pair<size_t, size_t>> arguments);

  // The inputs that are arguments, if all else is as remembered, and no argument shares memory with another
  // input; otherwise nothing, and the caller has to look closer.
  py::object given(const py::list& values, const py::list& leaves) const;
  // The state has been found to fit: these are its handles, None for inputs that each replay has its own of.
  void remember(const py::list& values, const std::vector<Ptr<Handle>>& inputs);

  // The tensors of the remembered handles, None for inputs that each replay has its own of; None instead of the list if
  // one of them has no tensor yet, begins in the middle of its memory, or was left half updated by a failed step.
  py::object tensors() const;

  const Layout& layout() const { return layout_; }
  const std::shared_ptr<Bound>& bound() const { return bound_; }

 private:
  bool has_handles(const py::list& values) const;

  Layout layout_;
  std::vector<size_t> tensors_;
  std::vector<Ptr<Handle>> handles_;  // of these tensors
  std::vector<std::pair<size_t, size_t>> arguments_;
  std::shared_ptr<Bound> bound_;
};

// The inputs of a replay, in program order: those of the state, and the given ones.
struct BoundInputs {
  std::shared_ptr<const State::Bound> bound;
  Given given;

  Handles all() const;
  py::list tensors() const;
  std::vector<Ptr<Handle>> suspects() const;
};

// A known program on given inputs, without a recording. Has what a `Cut` has for a recorded one.
class Binding {
 public:
  Binding(const State& state, Given given);

  // Tell the handles and their memory which run makes and writes them.
  void commit(const py::object& run);
  // The tensors of the given inputs, if nothing has to be done before the run: they are there, no snapshot needs a value
  // that the run overwrites, and no input was left half updated by a failed step. None otherwise. After `commit`.
  py::object own_tensors() const;
  // What bindings with the same state have in common: one object for them all.
  std::shared_ptr<State::Bound> bound() const { return bound_; }

  std::shared_ptr<BoundInputs> inputs;
  std::shared_ptr<Handles> outputs;
  std::shared_ptr<Written> written;

 private:
  std::shared_ptr<State::Bound> bound_;
  std::vector<Ptr<Memory>> own_written_;  // that is no state
};

// Numbers in CPU tensors of one element each, all equal: the step counts of an optimizer.
class Counts {
 public:
  explicit Counts(std::vector<at::Tensor> tensors);
  // The number; None if they differ, or if one of the tensors has become another kind of tensor.
  py::object read() const;
  void write(const py::object& number) const;

 private:
  std::vector<at::Tensor> tensors_;
  at::ScalarType dtype_;
};

}  // namespace lazystep
