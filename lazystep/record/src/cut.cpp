#include "cut.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_map>

namespace lazystep {

namespace {

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

}  // namespace

py::object none_if_null(const PyRef& ref) {
  return ref ? py::reinterpret_borrow<py::object>(ref.get()) : py::none();
}

py::object none_if_null(const Ptr<PyBox>& box) { return box ? none_if_null(box->python) : py::none(); }

Ptr<PyBox> box_of(const py::object& object) {
  return object.is_none() ? nullptr : c10::make_intrusive<PyBox>(object.ptr());
}

namespace {

// What keeps the memory alive behind storages that begin in the middle of it.
struct Middle {
  at::Tensor whole;  // a tensor in the memory
  int64_t origin;    // in bytes

  static void drop(void* middle) { delete static_cast<Middle*>(middle); }
};

// The same elements, seen in another storage of the same memory.
at::Tensor move_to(const at::Tensor& tensor, c10::Storage storage, int64_t offset) {
  auto impl = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  return at::Tensor(std::move(impl));
}

std::unordered_map<Memory*, int64_t> origins_of(const std::vector<Ptr<Handle>>& handles) {
  std::unordered_map<Memory*, int64_t> origins;
  for (const auto& handle : handles) {
    int64_t offset = handle->type->byte_offset();
    auto [found, is_new] = origins.emplace(handle->memory.get(), offset);
    found->second = std::min(found->second, offset);
  }
  return origins;
}

bool has_offset(const std::vector<Ptr<Handle>>& handles) {
  return std::any_of(handles.begin(), handles.end(), [](const auto& handle) { return handle->type->offset > 0; });
}

}  // namespace

py::list Handles::tensors() const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(handles.size());
  for (const auto& handle : handles) {
    TORCH_INTERNAL_ASSERT(handle->value().defined(), "an input of a run has neither a tensor nor an error");
    tensors.push_back(handle->tensor);
  }
  if (has_offset(handles)) {
    // See [Note: offsets] in recorder.h.
    auto origins = origins_of(handles);
    std::unordered_map<Memory*, c10::Storage> storages;
    for (size_t i = 0; i < handles.size(); ++i) {
      Memory* memory = handles[i]->memory.get();
      int64_t origin = origins[memory];
      if (origin == 0) continue;
      const c10::Storage& whole = tensors[i].storage();
      auto [found, is_new] = storages.try_emplace(memory);
      if (is_new) {
        auto* start = static_cast<char*>(whole.data_ptr().get()) + origin;
        c10::DataPtr data(start, new Middle{tensors[i], origin}, &Middle::drop, c10::Device(c10::kCPU));
        auto nbytes = static_cast<int64_t>(whole.nbytes()) - origin;
        found->second = c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(), nbytes, std::move(data), nullptr, false);
      }
      int64_t itemsize = static_cast<int64_t>(tensors[i].itemsize());
      tensors[i] = move_to(tensors[i], found->second, tensors[i].storage_offset() - origin / itemsize);
    }
  }
  py::list list(handles.size());
  for (size_t i = 0; i < handles.size(); ++i) {
    list[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensors[i])));
  }
  return list;
}

void Handles::deliver(const py::list& tensors) const {
  TORCH_CHECK(tensors.size() == handles.size(), "a run has returned ", tensors.size(), " outputs");
  for (size_t i = 0; i < handles.size(); ++i) {
    if (!handles[i]) continue;
    at::Tensor tensor = THPVariable_Unpack(py::object(tensors[i]).ptr());
    const c10::DataPtr& data = tensor.storage().data_ptr();
    if (data.get_deleter() == &Middle::drop) {  // a view of an input: other tensors are in the memory as a whole
      const auto& [whole, origin] = *static_cast<Middle*>(data.get_context());
      int64_t shift = origin / static_cast<int64_t>(tensor.itemsize());
      tensor = move_to(tensor, whole.storage(), tensor.storage_offset() + shift);
    }
    handles[i]->tensor = std::move(tensor);
  }
}

std::vector<Ptr<Handle>> Handles::suspects() const {
  std::vector<Ptr<Handle>> found;
  for (const auto& handle : handles) {
    if (handle->memory->has_error || !handle->value().defined()) found.push_back(handle);
  }
  return found;
}

py::list Scalars::tolist() const {
  py::list list(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) list[i] = to_python(numbers[i]);
  return list;
}

std::vector<Ptr<Memory>> Written::with_snapshots() const {
  std::vector<Ptr<Memory>> found;
  for (const auto& [number, memory] : memories) {
    if (memory->snapshots) found.push_back(memory);
  }
  return found;
}

Ptr<Memory> Written::get(int64_t wanted) const {
  for (const auto& [number, memory] : memories) {
    if (number == wanted) return memory;
  }
  return nullptr;
}

Cut::Cut(Finished finished, Ptr<KnownRecording> known)
    : id(finished.recording.id),
      known(std::move(known)),
      num_instructions(finished.recording.num_entries - finished.recording.inputs.size()),
      started(finished.recording.started),
      live_(std::move(finished.live)) {
  inputs = std::make_shared<Handles>(Handles{std::move(finished.recording.inputs)});
  scalars = std::make_shared<Scalars>(Scalars{std::move(finished.recording.numbers)});
  written = std::make_shared<Written>(Written{std::move(finished.recording.written)});
}

py::tuple Cut::outputs() const {
  py::tuple values(live_.size());
  for (size_t i = 0; i < live_.size(); ++i) values[i] = live_[i].first;
  return values;
}

Handles Cut::handles_of(const py::tuple& values) const {
  Handles found;
  size_t at = 0;
  for (auto item : values) {
    auto value = item.cast<int64_t>();
    while (at < live_.size() && live_[at].first < value) ++at;
    bool is_live = at < live_.size() && live_[at].first == value;
    found.handles.push_back(is_live ? live_[at].second : nullptr);
  }
  return found;
}

void Cut::commit(const py::object& run) {
  Commit commit(run);
  auto set_writer = [&](Memory& memory) {
    commit.set(memory);
    // Another thread's next recording may have written it already.
    if (memory.writer == id) memory.writer = 0;
  };
  for (const auto& [number, memory] : written->memories) set_writer(*memory);
  for (const auto& [value, handle] : live_) {
    commit.set(*handle);
    if (handle->memory->writer == id) set_writer(*handle->memory);
  }
}

}  // namespace lazystep
