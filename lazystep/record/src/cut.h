// A finished recording, as the barrier hands it to a run.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "recorder.h"

namespace lazystep {

namespace py = pybind11;

// The inputs or outputs of a run, in program order. Python handles are made only when Python asks for one.
struct Handles {
  std::vector<Ptr<Handle>> handles;

  // The real tensors, as a list.
  py::list tensors() const;
  // Give each handle its tensor. A null handle is an output that nothing uses any more.
  void deliver(const py::list& tensors) const;
  // The handles that an earlier failure may concern.
  std::vector<Ptr<Handle>> suspects() const;
};

// The numbers of a recording. They become Python objects when the executor asks for them.
struct Scalars {
  std::vector<Number> numbers;

  py::list tolist() const;
};

// The memory that a run writes, by its storage number in the program.
struct Written {
  std::vector<std::pair<int64_t, Ptr<Memory>>> memories;

  std::vector<Ptr<Memory>> with_snapshots() const;
  Ptr<Memory> get(int64_t number) const;
};

// Tells handles and memory which run makes or writes them, under the recorder's lock. What they had before is
// dropped after the lock is free: see [Note: locks] in recorder.h.
class Commit {
 public:
  explicit Commit(const py::object& run) : box_(c10::make_intrusive<PyBox>(run.ptr())), lock_(recorder().mutex) {}

  void set(Handle& handle) {
    dropped_.push_back(std::move(handle.run));
    handle.run = box_;
  }
  // Unless the memory knows of this run already.
  void set(Memory& memory) {
    const auto& known = memory.run();
    if (!known || known->python.get() != box_->python.get()) set(memory, box_);
  }
  void set(Memory& memory, const Ptr<PyBox>& box) { dropped_.push_back(memory.set_run(box)); }
  // All memory that has this box.
  void set(PyBox& box, const py::object& run) {
    dropped_runs_.push_back(std::exchange(box.python, PyRef::borrow(run.ptr())));
  }

 private:
  Ptr<PyBox> box_;
  std::vector<Ptr<PyBox>> dropped_;
  std::vector<PyRef> dropped_runs_;
  std::lock_guard<std::mutex> lock_;
};

// A finished recording.
struct Cut {
  Cut(Finished finished, Ptr<KnownRecording> known);

  // The numbers of the values that were alive at the barrier.
  py::tuple outputs() const;
  // The live handles of these values, null for a value that has died. Both are in rising order.
  Handles handles_of(const py::tuple& values) const;
  void commit(const py::object& run);

  RecordingId id;
  Ptr<KnownRecording> known;
  std::shared_ptr<Handles> inputs;
  std::shared_ptr<Scalars> scalars;
  std::shared_ptr<Written> written;
  size_t num_instructions;
  double started;

 private:
  std::vector<std::pair<int64_t, Ptr<Handle>>> live_;
};

// A run, or None, as a box that can be copied without the GIL; and back.
Ptr<PyBox> box_of(const py::object& object);
py::object none_if_null(const PyRef& ref);
py::object none_if_null(const Ptr<PyBox>& box);

}  // namespace lazystep
