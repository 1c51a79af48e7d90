// The Python side of the native recorder: handles, storages, the recorder, and registration.
// Typed in _recorder.pyi; used by record/native/front_end.py alone.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <memory>
#include <unordered_map>

#include "host.h"
#include "kernel.h"
#include "recorder.h"

namespace lazystep {

namespace {

py::object none_if_null(const PyRef& ref) {
  return ref ? py::reinterpret_borrow<py::object>(ref.get()) : py::none();
}

py::object none_if_null(const Ptr<PyBox>& box) { return box ? none_if_null(box->python) : py::none(); }

Ptr<PyBox> box_of(const py::object& object) {
  return object.is_none() ? nullptr : c10::make_intrusive<PyBox>(object.ptr());
}

py::object to_python(const Number& number) {
  struct {
    py::object operator()(double value) const { return py::float_(value); }
    py::object operator()(int64_t value) const { return py::int_(value); }
    py::object operator()(c10::complex<double> value) const {
      return py::reinterpret_steal<py::object>(PyComplex_FromDoubles(value.real(), value.imag()));
    }
  } convert;
  return std::visit(convert, number);
}

Number to_number(py::handle object) {
  if (PyFloat_CheckExact(object.ptr())) return object.cast<double>();
  if (PyComplex_CheckExact(object.ptr())) {
    return c10::complex<double>(PyComplex_RealAsDouble(object.ptr()), PyComplex_ImagAsDouble(object.ptr()));
  }
  return object.cast<int64_t>();
}

LazyImpl* lazy_impl(py::handle object) {
  return THPVariable_Check(object.ptr()) ? as_lazy(THPVariable_Unpack(object.ptr()).unsafeGetTensorImpl())
                                         : nullptr;
}

void set_error(Alias& alias, const py::object& error) {
  alias.error = error.is_none() ? PyRef() : PyRef::borrow(error.ptr());
  alias.has_error = !error.is_none();
}

// `tensor.to("lazy")` asks the guard for the device's index: there is one lazy device.
struct DeviceGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::Lazy> {
  c10::Device getDevice() const override { return lazy_device(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

// -- what a barrier takes over -----------------------------------------------------------------

// Values in a row: the inputs or outputs of a run. A sequence of handles that makes them when asked.
struct Cells {
  std::vector<Ptr<Value>> values;

  // The real tensors, as a list.
  py::list tensors() const {
    py::list list(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      TORCH_INTERNAL_ASSERT(values[i]->tensor.defined(), "an input of a run has neither a tensor nor an error");
      list[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(values[i]->tensor));
    }
    return list;
  }

  // Give each value its tensor; null values are not wanted.
  void deliver(const py::list& tensors) const {
    TORCH_CHECK(tensors.size() == values.size(), "a run has returned ", tensors.size(), " outputs");
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i]) values[i]->tensor = THPVariable_Unpack(py::object(tensors[i]).ptr());
    }
  }

  // The values that an earlier failure may concern.
  std::vector<Ptr<Value>> suspects() const {
    std::vector<Ptr<Value>> found;
    for (const auto& value : values) {
      if (value->alias->has_error || !value->tensor.defined()) found.push_back(value);
    }
    return found;
  }
};

// The numbers of a recording: Python objects only where somebody looks at them.
struct Scalars {
  std::vector<Number> numbers;

  py::list to_list() const {
    py::list list(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) list[i] = to_python(numbers[i]);
    return list;
  }
};

// The memory that a recording writes, under its numbers there: the next one numbers it anew.
struct Written {
  std::vector<std::pair<int64_t, Ptr<Alias>>> aliases;

  std::vector<Ptr<Alias>> with_snapshots() const {
    std::vector<Ptr<Alias>> found;
    for (const auto& [number, alias] : aliases) {
      if (alias->snapshots) found.push_back(alias);
    }
    return found;
  }

  Ptr<Alias> get(int64_t wanted) const {
    for (const auto& [number, alias] : aliases) {
      if (number == wanted) return alias;
    }
    return nullptr;
  }
};

// Tells whether a value is alive without keeping it so: a Python handle may die before its value.
struct WeakHandle {
  c10::weak_intrusive_ptr<Value> value;
};

// The memory of a program: which storages its inputs and outputs are views of, and which it writes.
struct Layout {
  struct Output {
    Ptr<Type> type;
    int64_t number;
    int64_t nbytes;
  };

  Layout(std::vector<int64_t> inputs, const std::vector<std::tuple<py::object, int64_t, int64_t>>& outputs,
         std::vector<int64_t> written)
      : inputs(std::move(inputs)), written(std::move(written)) {
    for (const auto& [type, number, nbytes] : outputs) {
      this->outputs.push_back({type_from_python(type.ptr()), number, nbytes});
    }
  }

  std::vector<int64_t> inputs;
  std::vector<Output> outputs;
  std::vector<int64_t> written;
};

// Tell values and memory which run makes and writes them; whatever they had is dropped without the lock.
class Commit {
 public:
  explicit Commit(const py::object& run) : box_(box_of(run)), lock_(recorder().mutex) {}

  void set(Ptr<PyBox>& place) {
    dropped_.push_back(std::move(place));
    place = box_;
  }

 private:
  Ptr<PyBox> box_;
  std::vector<Ptr<PyBox>> dropped_;
  std::lock_guard<std::mutex> lock_;
};

// A known program on given inputs, without a recording.
struct Binding {
  Binding(const Layout& layout, std::vector<Ptr<Value>> handles) : inputs{std::move(handles)} {
    TORCH_CHECK(inputs.values.size() == layout.inputs.size(), "a program has ", layout.inputs.size(), " inputs");
    std::unordered_map<int64_t, Ptr<Alias>> aliases;
    for (size_t i = 0; i < layout.inputs.size(); ++i) aliases[layout.inputs[i]] = inputs.values[i]->alias;
    for (const auto& [type, number, nbytes] : layout.outputs) {
      Ptr<Alias>& alias = aliases[number];
      if (!alias) alias = c10::make_intrusive<Alias>(nbytes);
      outputs.values.push_back(c10::make_intrusive<Value>(type, alias));
    }
    for (int64_t number : layout.written) written.aliases.emplace_back(number, aliases.at(number));
  }

  void commit(const py::object& run) {
    Commit commit(run);
    for (const auto& value : inputs.values) value->pristine = false;
    for (const auto& [number, alias] : written.aliases) commit.set(alias->run);
    for (const auto& value : outputs.values) {
      commit.set(value->run);
      commit.set(value->alias->run);
    }
  }

  Cells inputs, outputs;
  Written written;
};

struct PythonCut {
  Cut cut;
  Ptr<Known> known;
  std::shared_ptr<Written> written;  // of the recording
  size_t num_instructions = 0;

  py::tuple outputs() const {
    py::tuple indices(cut.live.size());
    for (size_t i = 0; i < cut.live.size(); ++i) indices[i] = cut.live[i].first;
    return indices;
  }

  // Taken out, not copied: a barrier asks once.
  Cells take_inputs() { return {std::move(cut.recording.inputs)}; }

  Scalars take_scalars() { return {std::move(cut.recording.numbers)}; }

  // The live values with these indices; null for those that are not alive. Both are in rising order.
  Cells cells(const py::tuple& indices) const {
    Cells cells;
    size_t at = 0;
    for (auto item : indices) {
      auto index = item.cast<int64_t>();
      while (at < cut.live.size() && cut.live[at].first < index) ++at;
      bool is_live = at < cut.live.size() && cut.live[at].first == index;
      cells.values.push_back(is_live ? cut.live[at].second : nullptr);
    }
    return cells;
  }


  // Tell what was recorded which run makes and writes it.
  void commit(const py::object& run) {
    Commit commit(run);
    auto set_writer = [&](Alias& alias) {
      commit.set(alias.run);
      // The next recording may have written it already, on another thread.
      if (alias.writer == cut.recording.id) alias.writer = 0;
    };
    for (const auto& [number, alias] : written->aliases) set_writer(*alias);
    for (const auto& [index, value] : cut.live) {
      commit.set(value->run);
      if (value->alias->writer == cut.recording.id) set_writer(*value->alias);
    }
  }
};

py::list entries_to_python(const Known& known) {
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

py::list sources_to_python(const Known& known) {
  py::list list(known.sources.size());
  for (size_t i = 0; i < known.sources.size(); ++i) list[i] = none_if_null(known.sources[i]);
  return list;
}

std::vector<Ptr<Value>> record_from_python(
    const py::object& decision, const std::vector<Ptr<Value>>& handles, const py::list& scalars) {
  c10::SmallVector<Value*, 8> operands;
  for (const auto& handle : handles) operands.push_back(handle.get());
  c10::SmallVector<Number, 4> numbers;
  for (auto scalar : scalars) numbers.push_back(to_number(scalar));
  c10::SmallVector<Ptr<Value>, 4> made;
  auto native = decision_from_python(decision.ptr());
  after_recording(recorder().record(native, operands, numbers, made));
  return {made.begin(), made.end()};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("torch_version") = TORCH_VERSION;

  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const OperandError& error) {
      PyObject* object = error.alias->error.get();
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(object)), object);
    } catch (python_error& error) {
      error.restore();
    }
  });

  py::class_<Alias, Ptr<Alias>>(module, "Storage")
      .def(py::init([](int64_t nbytes) { return c10::make_intrusive<Alias>(nbytes); }), py::arg("nbytes"))
      .def_property(
          "nbytes", [](const Alias& alias) { return alias.nbytes(); },
          [](Alias& alias, int64_t nbytes) { alias.set_nbytes(nbytes); })
      .def_property(
          "error", [](const Alias& alias) { return none_if_null(alias.error); }, &set_error)
      .def_property(
          "run", [](const Alias& alias) { return none_if_null(alias.run); },
          [](Alias& alias, const py::object& run) { alias.run = box_of(run); })
      .def_property(
          "snapshots",
          [](const Alias& alias) -> py::object {
            return alias.snapshots ? py::reinterpret_borrow<py::object>(alias.snapshots.get()) : py::tuple();
          },
          [](Alias& alias, const py::sequence& snapshots) {
            alias.snapshots = snapshots.size() ? PyRef::borrow(snapshots.ptr()) : PyRef();
          });

  py::class_<Value, Ptr<Value>>(module, "Handle")
      .def(
          py::init([](const py::object& type, Ptr<Alias> storage) {
            return c10::make_intrusive<Value>(type_from_python(type.ptr()), std::move(storage));
          }),
          py::arg("type"), py::arg("storage"))
      .def_property_readonly("type", [](const Value& value) { return none_if_null(value.type->python); })
      .def_property_readonly("storage", [](const Value& value) { return value.alias; })
      .def_property(
          "tensor",
          [](const Value& value) -> py::object {
            return value.tensor.defined() ? py::cast(value.tensor) : py::none();
          },
          [](Value& value, const at::Tensor& tensor) { value.tensor = tensor; })
      .def_property(
          "run", [](const Value& value) { return none_if_null(value.run); },
          [](Value& value, const py::object& run) { value.run = box_of(run); })
      .def_property(
          "pristine", [](const Value& value) { return value.pristine.load(); },
          [](Value& value, bool pristine) { value.pristine = pristine; })
      .def_property_readonly(
          "is_alone",
          [](Value& value) {
            // One reference is that of the Python object that asks, the other the value's.
            return c10::raw::intrusive_ptr::use_count(&value) == 1 && value.alias.use_count() == 1;
          })
      .def("weakly", [](const Ptr<Value>& value) { return WeakHandle{c10::weak_intrusive_ptr<Value>(value)}; })
      .def("__reduce_ex__", [](const py::object&, const py::object&) -> py::object {
        throw py::type_error("a handle belongs to its process and can't be pickled or copied");
      });

  py::class_<WeakHandle>(module, "WeakHandle").def("__call__", [](const WeakHandle& weak) {
    return weak.value.lock();
  });

  py::class_<Layout>(module, "Layout")
      .def(py::init<
           std::vector<int64_t>, const std::vector<std::tuple<py::object, int64_t, int64_t>>&, std::vector<int64_t>>());

  py::class_<Binding>(module, "Binding")
      .def(py::init<const Layout&, std::vector<Ptr<Value>>>())
      .def_readonly("inputs", &Binding::inputs)
      .def_readonly("outputs", &Binding::outputs)
      .def_readonly("written", &Binding::written)
      .def("commit", &Binding::commit);

  py::class_<Known, Ptr<Known>>(module, "KnownRecording")
      .def_property_readonly("entries", &entries_to_python)
      .def_property_readonly("sources", &sources_to_python);

  py::class_<Cells>(module, "Cells")
      .def("__len__", [](const Cells& cells) { return cells.values.size(); })
      .def(
          "__getitem__",
          [](const Cells& cells, size_t i) {
            if (i >= cells.values.size()) throw py::index_error();
            return cells.values[i];
          })
      .def("tensors", &Cells::tensors)
      .def("deliver", &Cells::deliver)
      .def("suspects", &Cells::suspects);

  py::class_<Scalars>(module, "Scalars").def("tolist", &Scalars::to_list);

  py::class_<Written, std::shared_ptr<Written>>(module, "Written")
      .def("with_snapshots", &Written::with_snapshots)
      .def("get", &Written::get);

  py::class_<PythonCut>(module, "Cut")
      .def_readonly("known", &PythonCut::known)
      .def_property_readonly("outputs", &PythonCut::outputs)
      .def_property_readonly("inputs", &PythonCut::take_inputs)
      .def_property_readonly("scalars", &PythonCut::take_scalars)
      .def_readonly("written", &PythonCut::written)
      .def_property_readonly("started", [](const PythonCut& cut) { return cut.cut.recording.started; })
      .def_property_readonly(
          "num_instructions",
          [](const PythonCut& cut) { return cut.num_instructions; })
      .def("cells", &PythonCut::cells)
      .def("commit", &PythonCut::commit);

  // -- the recorder: one per process
  module.def("record", &record_from_python);
  module.def("num_entries", [] { return recorder().num_entries(); });
  module.def("num_lookups", [] { return recorder().num_lookups.load(); });
  module.def("num_alive", [] { return std::make_pair(num_values.load(), num_aliases.load()); });
  module.def("num_calls_to_python", &num_calls_to_python);
  module.def("set_max_entries", [](size_t limit) { recorder().max_entries = limit; });
  module.def("is_pending", [](const Value& value) { return recorder().is_pending(value); });
  module.def("index_in_current", [](const Value& value) { return recorder().index_in_current(value); });
  module.def("cut", []() -> py::object {
    PythonCut cut;
    if (!recorder().cut(cut.cut)) return py::none();
    cut.num_instructions = cut.cut.recording.num_entries - cut.cut.recording.inputs.size();
    cut.known = recorder().identify(cut.cut.recording);
    cut.written = std::make_shared<Written>(Written{std::move(cut.cut.recording.written)});
    return py::cast(std::move(cut));
  });
  module.def("peek", [] { return recorder().peek(); });
  module.def("guess_next", [](const Ptr<Known>& known) { recorder().guess_next(known); });

  // -- tensors
  module.def("handle_of", [](py::handle object) -> Ptr<Value> {
    LazyImpl* lazy = lazy_impl(object);
    return lazy == nullptr ? nullptr : lazy->value();
  });
  module.def("handles_of", [](const py::list& objects) {
    py::list handles(objects.size());
    for (size_t i = 0; i < objects.size(); ++i) {
      LazyImpl* lazy = lazy_impl(objects[i]);
      handles[i] = lazy == nullptr ? py::none() : py::cast(lazy->value());
    }
    return handles;
  });
  module.def("have_handles", [](const py::list& objects, const py::list& handles) {
    if (objects.size() != handles.size()) return false;
    for (size_t i = 0; i < objects.size(); ++i) {
      LazyImpl* lazy = lazy_impl(objects[i]);
      if (lazy == nullptr || lazy->value().get() != py::cast<Value*>(handles[i])) return false;
    }
    return true;
  });
  module.def("gradient_flags", [](const py::list& tensors) {
    std::string flags(tensors.size(), 0);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = THPVariable_Unpack(tensors[i].ptr());
      // A tensor that autograd has never met has none of these.
      if (torch::autograd::impl::get_autograd_meta(tensor) == nullptr) continue;
      flags[i] = static_cast<char>(
          tensor.requires_grad() | (tensor.grad().defined() << 1) |
          (!torch::autograd::impl::hooks(tensor).empty() << 2) |
          ((torch::autograd::impl::post_acc_grad_hooks(tensor) != nullptr) << 3));
    }
    return py::bytes(flags);
  });
  module.def("is_lazy", [](py::handle object) { return lazy_impl(object) != nullptr; });
  module.def("wrap", [](Ptr<Value> value) { return make_tensor(std::move(value)); });
  module.def("retype", [](py::handle tensor, Ptr<Value> value) { lazy_impl(tensor)->retype(std::move(value)); });

  // -- registration
  module.def(
      "connect",
      [](py::object traits, py::object decide, py::object dispatch, py::object source, py::object on_full,
         py::object on_draw, uintptr_t set_num_threads) {
        connect(
            {std::move(traits), std::move(decide), std::move(dispatch), std::move(source), std::move(on_full),
             std::move(on_draw)});
        use_thread_setter(reinterpret_cast<SetNumThreads>(set_num_threads));
        static DeviceGuard guard;
        c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::Lazy)] = &guard;
      },
      py::arg("traits"), py::arg("decide"), py::arg("dispatch"), py::arg("source"), py::arg("on_full"),
      py::arg("on_draw"), py::arg("set_num_threads"));
  module.def("register_kernel", &register_kernel);
  module.def("register_sparse_kernel", &register_sparse_kernel);
  module.def("register_fallback", &register_fallback);
  module.def("set_logging", &set_logging);
  module.def("refuse", &refuse);
}

}  // namespace lazystep
