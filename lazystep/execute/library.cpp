// A library that AOTInductor built, run without the interpreter lock; the threads that run it; its collectives; and
// sequences of single ops.
//
// torch binds the same runner for Python, but its `run` keeps the lock until the step is over: the
// training thread can't record the next step meanwhile, no closure runs, no data loader's thread.
// Used by the modules of execute/ and by process_groups.py alone.
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <string>
#include <vector>

#include "chain.h"
#include "communicate.h"
#include "denormals.h"
#include "exit.h"
#include "op_sequence.h"
#include "thread_choice.h"
#include "threads.h"
#include "update.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using lazystep::Chain, lazystep::ReadyCall, lazystep::ReadyRun, lazystep::ThreadChoice;
  using lazystep::Communicated, lazystep::Group, lazystep::Launch;
  using lazystep::Library;
  module.attr("torch_version") = TORCH_VERSION;
  py::class_<Library, std::shared_ptr<Library>>(module, "Library", py::module_local())
      .def(py::init<const std::string&>(), py::arg("path"))
      .def("run", &Library::run_for_python, py::arg("arguments"))
      .def_property_readonly("seconds", &Library::seconds);
  module.def("flushes_denormals", &lazystep::flushes_denormals);
  module.def("call_c", [](uintptr_t function, int number) {
    return reinterpret_cast<int (*)(int)>(function)(number);
  }, py::arg("function"), py::arg("number"));
  module.def("prepare_exit", &lazystep::prepare_exit, py::arg("is_busy"));
  using lazystep::OpSequence;
  py::class_<OpSequence>(module, "OpSequence", py::module_local())
      .def(
          py::init<
              py::object, py::object, size_t, std::vector<size_t>, std::vector<size_t>, std::vector<size_t>>(),
          py::arg("ref"), py::arg("scalar_ref"), py::arg("num_registers"), py::arg("inputs"), py::arg("outputs"),
          py::arg("unused"))
      .def(
          "add_op", &OpSequence::add_op, py::arg("position"), py::arg("name"), py::arg("overload"), py::arg("args"),
          py::arg("kwargs"), py::arg("results"), py::arg("reads"), py::arg("dead"))
      .def(
          "expect", &OpSequence::expect, py::arg("at"), py::arg("dtype"), py::arg("sizes"), py::arg("strides"),
          py::arg("offset"), py::arg("is_conj"), py::arg("is_neg"), py::arg("viewed"), py::arg("mend"))
      .def("run", &OpSequence::run, py::arg("inputs"), py::arg("scalars"))
      .def_property_readonly("position", &OpSequence::position)
      .def_property_readonly("has_begun", &OpSequence::has_begun);
  py::class_<lazystep::Bell>(module, "Bell", py::module_local())
      .def(py::init<>())
      .def("ring", &lazystep::Bell::ring, py::arg("delay"))
      .def("stop", &lazystep::Bell::stop)
      .def("wait", &lazystep::Bell::wait, py::arg("timeout"));
  py::class_<at::ThreadLocalState>(module, "ThreadState", py::module_local())
      .def(py::init<>())
      .def("call", &lazystep::call_with, py::arg("function"));
  py::class_<Group, std::shared_ptr<Group>>(module, "Group", py::module_local())
      .def(py::init(&Group::make), py::arg("name"), py::arg("backend"), py::arg("timeout"))
      .def_property("agreed", &Group::agreed, &Group::set_agreed);
  py::class_<Launch>(module, "Launch", py::module_local())
      .def_readonly("number", &Launch::number)
      .def_readonly("kind", &Launch::kind)
      .def_readonly("size", &Launch::size)
      .def_readonly("dtype", &Launch::dtype)
      .def_readonly("group", &Launch::group)
      .def_readonly("started", &Launch::started)
      .def_readonly("waiting", &Launch::waiting)
      .def_readonly("ended", &Launch::ended);
  py::class_<Communicated>(module, "Communicated", py::module_local())
      .def_readonly("num_launched", &Communicated::num_launched)
      .def_readonly("num_pending", &Communicated::num_pending)
      .def_readonly("ended", &Communicated::ended)
      .def_readonly("failed", &Communicated::failed);
  module.def("observe_collectives", [](py::object observer, bool is_silent) {
    lazystep::InFlight::get().observe(std::move(observer), is_silent);
  }, py::arg("observer"), py::arg("is_silent"));
  module.def("num_pending", [] { return lazystep::InFlight::get().num_pending(); });
  module.def("take_communicated", [] { return lazystep::InFlight::get().take(); });
  py::class_<ThreadChoice, std::shared_ptr<ThreadChoice>>(module, "ThreadChoice", py::module_local())
      .def(py::init<std::vector<int>, const ThreadChoice*>(), py::arg("counts"), py::arg("like"))
      .def("next", &ThreadChoice::next)
      .def("took", &ThreadChoice::took, py::arg("seconds"));
  py::class_<ReadyCall, std::shared_ptr<ReadyCall>>(module, "ReadyCall", py::module_local())
      .def(
          py::init<
              std::shared_ptr<Library>, const std::vector<std::optional<at::Tensor>>&,
              const std::vector<std::pair<size_t, at::Tensor>>&, at::Tensor, std::vector<size_t>, at::Tensor,
              std::vector<size_t>, const std::vector<std::pair<size_t, py::object>>&, const std::vector<at::Tensor>&,
              std::shared_ptr<ThreadChoice>, std::vector<std::pair<std::shared_ptr<Group>, int64_t>>>(),
          py::arg("library"), py::arg("arguments"), py::arg("own"), py::arg("floats"), py::arg("floats_at"),
          py::arg("ints"), py::arg("ints_at"), py::arg("fixed"), py::arg("returned"), py::arg("threads"),
          py::arg("agreements"))
      .def("make_run", &ReadyRun::make, py::arg("own"), py::arg("numbers"));
  py::class_<ReadyRun, std::shared_ptr<ReadyRun>>(module, "ReadyRun", py::module_local())
      .def_property_readonly("is_done", &ReadyRun::is_done)
      .def_property_readonly("has_failed", &ReadyRun::has_failed)
      .def_property_readonly("is_refused", &ReadyRun::is_refused)
      .def_property_readonly("is_as_declared", &ReadyRun::is_as_declared)
      .def_property_readonly("error", &ReadyRun::error)
      .def_property_readonly("seconds", &ReadyRun::seconds)
      .def_property_readonly("communicated", &ReadyRun::communicated)
      .def("returned", &ReadyRun::returned)
      .def("arguments", &ReadyRun::arguments);
  py::class_<Chain>(module, "Chain", py::module_local())
      .def(py::init<>())
      .def("open", &Chain::open, py::arg("runs"), py::arg("stays_open"))
      .def("push", &Chain::push, py::arg("run"))
      .def("drain", &Chain::drain)
      .def("end_behind", &Chain::end_behind, py::arg("last"))
      .def("stop", &Chain::stop)
      .def("run", &Chain::run, py::arg("patience"))
      .def("note_end", &Chain::note_end)
      .def("wait_for_ends", &Chain::wait_for_ends, py::arg("wanted"), py::arg("timeout"))
      .def("note_settled", &Chain::note_settled)
      .def_property_readonly("num_ended", &Chain::num_ended)
      .def_property_readonly("num_unsettled", &Chain::num_unsettled)
      .def_property_readonly("num_run", &Chain::num_run)
      .def_property_readonly("num_returns", &Chain::num_returns)
      .def_property_readonly("num_wakes", &Chain::num_wakes);
}
