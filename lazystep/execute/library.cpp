// A library that AOTInductor built, run without the interpreter lock; the threads that run it; and single ops.
//
// torch binds the same runner for Python, but its `run` keeps the lock until the step is over: the
// training thread can't record the next step meanwhile, no closure runs, no data loader's thread.
// Used by execute/library.py, execute/threads.py and execute/reference.py alone.
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <string>
#include <vector>

#include "operation.h"
#include "threads.h"
#include "update.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using Runner = torch::inductor::AOTIModelContainerRunnerCpu;
  module.attr("torch_version") = TORCH_VERSION;
  py::class_<Runner>(module, "Library", py::module_local())
      .def(py::init<const std::string&>(), py::arg("path"))
      .def(
          "run",
          [](Runner& runner, const std::vector<at::Tensor>& arguments) {
            py::gil_scoped_release no_lock;
            return runner.run(arguments);
          },
          py::arg("arguments"));
  module.def("operation", &lazystep::operation, py::arg("name"), py::arg("overload"));
  py::class_<lazystep::Bell>(module, "Bell", py::module_local())
      .def(py::init<>())
      .def("ring", &lazystep::Bell::ring, py::arg("delay"))
      .def("stop", &lazystep::Bell::stop)
      .def("wait", &lazystep::Bell::wait, py::arg("timeout"));
  py::class_<at::ThreadLocalState>(module, "ThreadState", py::module_local())
      .def(py::init<>())
      .def("call", &lazystep::call_with, py::arg("function"));
}
