// The extension as Python sees it. Its types stand in ../_recorder.pyi.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "autocast.h"
#include "cut.h"
#include "host.h"
#include "kernel.h"
#include "replay.h"

namespace lazystep {

namespace {

// A handle that does not keep its value alive.
struct WeakHandle {
  c10::weak_intrusive_ptr<Handle> handle;
};

// `tensor.to("lazy")` asks the guard for the device's index. There is one lazy device.
struct DeviceGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::Lazy> {
  c10::Device getDevice() const override { return lazy_device(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

bool is_lazy(py::handle object) {
  return THPVariable_Check(object.ptr()) &&
      THPVariable_Unpack(object.ptr()).key_set().has_backend(c10::BackendComponent::LazyBit);
}

LazyImpl* lazy_impl(py::handle object) {
  return THPVariable_Check(object.ptr()) ? as_lazy(THPVariable_Unpack(object.ptr()).unsafeGetTensorImpl())
                                         : nullptr;
}

// The handle of a lazy tensor, null for any other object. A sparse one carries it in an attribute: ops/sparse.py.
Ptr<Handle> find_handle(py::handle object) {
  if (LazyImpl* lazy = lazy_impl(object)) return lazy->handle();
  return is_lazy(object) ? object.attr("_handle").cast<Ptr<Handle>>() : nullptr;
}

std::vector<Ptr<Handle>> find_handles(const py::list& objects) {
  std::vector<Ptr<Handle>> handles;
  handles.reserve(objects.size());
  for (auto object : objects) handles.push_back(find_handle(object));
  return handles;
}

// A byte per tensor: see `Flag`.
py::bytes gradient_flags(const py::list& tensors) {
  std::string flags(tensors.size(), 0);
  for (size_t i = 0; i < tensors.size(); ++i) {
    flags[i] = static_cast<char>(gradient_flags_of(THPVariable_Unpack(tensors[i].ptr())));
  }
  return py::bytes(flags);
}

py::list entries_to_python(const KnownRecording& known) {
  const Entries& entries = known.entries;
  py::list list(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    size_t start = entries.starts[i], size = entries.end_of(i) - start;
    py::tuple entry(size);
    Word head = entries.words[start];
    const PyRef& object = (head & 1) ? reinterpret_cast<Type*>(head ^ 1)->python
                                     : reinterpret_cast<Decision*>(head)->python;
    entry[0] = py::reinterpret_borrow<py::object>(object.get());
    for (size_t j = 1; j < size; ++j) entry[j] = static_cast<int64_t>(entries.words[start + j]);
    list[i] = std::move(entry);
  }
  return list;
}

py::list sources_to_python(const KnownRecording& known) {
  py::list list(known.sources.size());
  for (size_t i = 0; i < known.sources.size(); ++i) list[i] = none_if_null(known.sources[i]);
  return list;
}

void define_handles(py::module_& module) {
  py::class_<Memory, Ptr<Memory>>(module, "Memory")
      .def(py::init([](int64_t nbytes) { return c10::make_intrusive<Memory>(nbytes); }), py::arg("nbytes"))
      .def_property(
          "nbytes", [](const Memory& memory) { return memory.nbytes(); },
          [](Memory& memory, int64_t nbytes) { memory.set_nbytes(nbytes); })
      .def_property(
          "error", [](const Memory& memory) { return none_if_null(memory.error); },
          [](Memory& memory, const py::object& error) {
            memory.error = error.is_none() ? PyRef() : PyRef::borrow(error.ptr());
            memory.has_error = !error.is_none();
            num_damages += !error.is_none();
          })
      .def_property(
          "run", [](const Memory& memory) { return none_if_null(memory.run()); },
          [](Memory& memory, const py::object& run) { memory.set_run(box_of(run)); })
      .def_property(
          "snapshots",
          [](const Memory& memory) -> py::object {
            return memory.snapshots ? py::reinterpret_borrow<py::object>(memory.snapshots.get()) : py::tuple();
          },
          [](Memory& memory, const py::sequence& snapshots) {
            num_snapshotted += (snapshots.size() > 0) - static_cast<bool>(memory.snapshots);
            memory.snapshots = snapshots.size() ? PyRef::borrow(snapshots.ptr()) : PyRef();
          })
      .def_readwrite("address", &Memory::address);

  py::class_<Handle, Ptr<Handle>>(module, "Handle")
      .def(
          py::init([](const py::object& type, Ptr<Memory> memory) {
            return c10::make_intrusive<Handle>(type_from_python(type.ptr()), std::move(memory));
          }),
          py::arg("type"), py::arg("memory"))
      .def_property_readonly("type", [](const Handle& handle) { return none_if_null(handle.type->python); })
      .def_property_readonly("memory", [](const Handle& handle) { return handle.memory; })
      .def_property(
          "tensor",
          [](Handle& handle) -> py::object {
            return handle.value().defined() ? py::cast(handle.tensor) : py::none();
          },
          [](Handle& handle, const at::Tensor& tensor) { handle.tensor = tensor; })
      .def_property(
          "run", [](const Handle& handle) { return none_if_null(handle.maker()); },
          [](Handle& handle, const py::object& run) { handle.run = box_of(run); })
      .def_property(
          "pristine", [](const Handle& handle) { return handle.pristine.load(); },
          [](Handle& handle, bool pristine) { handle.pristine = pristine; })
      .def_property_readonly(
          "is_alone",
          [](Handle& handle) {
            // One reference to the handle is that of the Python object that asks, the one to the memory is ours.
            return c10::raw::intrusive_ptr::use_count(&handle) == 1 && handle.memory.use_count() == 1;
          })
      .def("weakly", [](const Ptr<Handle>& handle) { return WeakHandle{c10::weak_intrusive_ptr<Handle>(handle)}; })
      .def("__reduce_ex__", [](const py::object&, const py::object&) -> py::object {
        throw py::type_error("a handle belongs to its process and can't be pickled or copied");
      });

  py::class_<WeakHandle>(module, "WeakHandle").def("__call__", [](const WeakHandle& weak) {
    return weak.handle.lock();
  });

  py::class_<Handles, std::shared_ptr<Handles>>(module, "Handles")
      .def("__len__", [](const Handles& self) { return self.handles.size(); })
      .def(
          "__getitem__",
          [](const Handles& self, size_t i) {
            if (i >= self.handles.size()) throw py::index_error();
            return self.handles[i];
          })
      .def("tensors", &Handles::tensors)
      .def("deliver", &Handles::deliver)
      .def("suspects", &Handles::suspects);

  module.def("is_lazy", &is_lazy);
  module.def("has_changed_shape_in_place", [](const at::Tensor& tensor) {
    LazyImpl* lazy = as_lazy(tensor.unsafeGetTensorImpl());
    return lazy != nullptr && lazy->handle()->memory->has_rebound;
  });
  module.def("is_stale_view", &is_stale_view);
  module.def("find_handle", &find_handle);
  module.def("find_handles", &find_handles);
  module.def("gradient_flags", &gradient_flags);
  module.def("wrap", [](Ptr<Handle> handle) { return make_tensor(std::move(handle)); });
  module.def("retype", [](py::handle tensor, Ptr<Handle> handle) {
    LazyImpl* lazy = lazy_impl(tensor);
    TORCH_CHECK(lazy != nullptr, "retype takes a strided lazy tensor");
    lazy->retype(std::move(handle));
  });
}

// One recorder per process.
void define_recorder(py::module_& module) {
  py::class_<KnownRecording, Ptr<KnownRecording>>(module, "KnownRecording")
      .def_property_readonly("entries", &entries_to_python)
      .def_property_readonly("sources", &sources_to_python);

  py::class_<Scalars, std::shared_ptr<Scalars>>(module, "Scalars").def("tolist", &Scalars::tolist);

  py::class_<Written, std::shared_ptr<Written>>(module, "Written")
      .def("with_snapshots", &Written::with_snapshots)
      .def("get", &Written::get);

  py::class_<Cut>(module, "Cut")
      .def_readonly("known", &Cut::known)
      .def_readonly("inputs", &Cut::inputs)
      .def_readonly("scalars", &Cut::scalars)
      .def_readonly("written", &Cut::written)
      .def_readonly("num_instructions", &Cut::num_instructions)
      .def_readonly("started", &Cut::started)
      .def_property_readonly("outputs", &Cut::outputs)
      .def("handles_of", &Cut::handles_of)
      .def("commit", &Cut::commit);

  module.def("num_entries", [] { return recorder().num_entries(); });
  module.def("num_lookups", [] { return recorder().num_lookups.load(); });
  module.def("num_alive", [] { return std::make_pair(num_handles.load(), num_memories.load()); });
  module.def("num_calls_to_python", &num_calls_to_python);
  module.def("set_max_entries", [](size_t limit) { recorder().max_entries = limit; });
  module.def("is_pending", [](const Handle& handle) { return recorder().is_pending(handle); });
  module.def("index_in_current", [](const Handle& handle) { return recorder().index_in_current(handle); });
  module.def("cut", []() -> std::unique_ptr<Cut> {
    Finished finished;
    if (!recorder().cut(finished)) return nullptr;
    auto known = recorder().identify(finished.recording);
    return std::make_unique<Cut>(std::move(finished), std::move(known));
  });
  module.def("peek", [] { return recorder().peek(); });
  module.def("peek_operands", [] {
    auto [inputs, numbers] = recorder().peek_operands();
    return std::make_pair(
        std::make_shared<Handles>(Handles{std::move(inputs)}), Scalars{std::move(numbers)}.tolist());
  });
  module.def("guess_next", [](const Ptr<KnownRecording>& known) { recorder().guess_next(known); });
}

void define_replays(py::module_& module) {
  module.def("plain_modes", &plain_modes);
  module.def("settings_and_keys", &settings_and_keys);
  module.def("take_arguments", &take_arguments);

  py::class_<TensorFlags>(module, "TensorFlags")
      .def(
          py::init([](std::vector<size_t> positions, const py::bytes& flags, const py::bytes& ignored) {
            return TensorFlags(std::move(positions), flags, ignored);
          }),
          py::arg("positions"), py::arg("flags"), py::arg("ignored"))
      .def("hold", &TensorFlags::hold);

  py::class_<Layout>(module, "Layout")
      .def(
          py::init<
              std::vector<int64_t>, const std::vector<std::tuple<py::object, int64_t, int64_t>>&,
              std::vector<int64_t>>(),
          py::arg("inputs"), py::arg("outputs"), py::arg("written"));

  py::class_<State::Bound, std::shared_ptr<State::Bound>>(module, "Bound");

  py::class_<State>(module, "State")
      .def(
          py::init<Layout, std::vector<size_t>, std::vector<std::pair<size_t, size_t>>>(), py::arg("layout"),
          py::arg("tensors"), py::arg("arguments"))
      .def("given", &State::given)
      .def("tensors", &State::tensors)
      .def("remember", &State::remember);

  py::class_<BoundInputs, std::shared_ptr<BoundInputs>>(module, "BoundInputs")
      .def("tensors", &BoundInputs::tensors)
      .def("suspects", &BoundInputs::suspects);

  py::class_<Binding>(module, "Binding")
      .def(py::init<const State&, Given>(), py::arg("state"), py::arg("given"))
      .def_readonly("inputs", &Binding::inputs)
      .def_readonly("outputs", &Binding::outputs)
      .def_readonly("written", &Binding::written)
      .def_property_readonly("bound", &Binding::bound)
      .def("own_tensors", &Binding::own_tensors)
      .def("commit", &Binding::commit);

  py::class_<Counts>(module, "Counts")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("tensors"))
      .def("read", &Counts::read)
      .def("write", &Counts::write);
}

void define_autocast(py::module_& module) {
  py::enum_<CastTo>(module, "CastTo")
      .value("LOWER", CastTo::kLower)
      .value("PROMOTE", CastTo::kPromote)
      .value("FIXED", CastTo::kFixed);
  module.def("register_cast_fallback", &register_cast_fallback);
  module.def(
      "register_cast",
      [](const std::string& name, const std::string& overload, CastTo to, const py::object& fixed) {
        register_cast(name, overload, to, reinterpret_cast<THPDtype*>(fixed.ptr())->scalar_type);
      });
  module.def("include_casts", &include_casts);
  module.def("cast_to_lower", &cast_to_lower);
  module.def("clear_casts", &clear_casts, py::call_guard<py::gil_scoped_release>());
  module.def("num_casts", &num_casts);
  module.def("casts_around", &casts_around);
}

void define_registration(py::module_& module) {
  py::enum_<Mode>(module, "Mode")
      .value("RECORD", Mode::kRecord)
      .value("HANDLER", Mode::kHandler)
      .value("COMPOSITE", Mode::kComposite)
      .value("DETACH", Mode::kDetach)
      .value("OVERWRITE", Mode::kOverwrite)
      .value("EMPTY", Mode::kEmpty)
      .value("TO_COPY", Mode::kToCopy);
  module.def(
      "install",
      [](const py::object& dispatch, uintptr_t set_num_threads) {
        install(dispatch);
        use_thread_setter(reinterpret_cast<SetNumThreads>(set_num_threads));
        static DeviceGuard guard;
        c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::Lazy)] = &guard;
      },
      py::arg("dispatch"), py::arg("set_num_threads"));
  module.def("installed", &installed);
  module.def("register_kernel", &register_kernel);
  module.def("register_sparse_kernel", &register_sparse_kernel);
  module.def("register_fallback", &register_fallback);
  module.def("begin_observed_call", [] { recorder().observed.begin(); });
  module.def("end_observed_call", [] { recorder().observed.end(); });
  module.def("is_in_observed_call", [] { return recorder().observed.is_here(); });
  module.def("num_foreign_ops", [] { return recorder().observed.num_foreign(); });
  module.def("refuse", &refuse);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("torch_version") = TORCH_VERSION;
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (python_error& error) {
      error.restore();
    }
  });
  define_handles(module);
  define_recorder(module);
  define_replays(module);
  define_autocast(module);
  define_registration(module);
}

}  // namespace lazystep
