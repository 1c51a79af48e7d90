// A finished recording, or a known program on given inputs, as the barrier hands it to a run.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <tuple>
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
};

// A known program on given inputs, without a recording.
struct Binding {
  Binding(const Layout& layout, std::vector<Ptr<Handle>> handles);

  // Tell the handles and their memory which run makes and writes them.
  void commit(const py::object& run);

  std::shared_ptr<Handles> inputs, outputs;
  std::shared_ptr<Written> written;
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
