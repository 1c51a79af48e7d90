#include "replay.h"

#include "../../execute/denormals.h"
#include "autocast.h"
#include "host.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>

namespace lazystep {

namespace {

// Bytes between the beginning of a tensor, which has the pointer to what autograd knows, and its last members.
constexpr size_t kKeysAt = 192;

c10::TensorImpl* impl_at(const py::list& values, size_t position) {
  PyObject* object = PyList_GET_ITEM(values.ptr(), position);
  return THPVariable_Check(object) ? THPVariable_Unpack(object).unsafeGetTensorImpl() : nullptr;
}

// Ask for the memory of these tensors in advance: see [Note: cold memory].
void fetch(const py::list& values, const std::vector<size_t>& positions) {
  for (size_t position : positions) __builtin_prefetch(PyList_GET_ITEM(values.ptr(), position));
  for (size_t position : positions) {
    const char* impl = reinterpret_cast<const char*>(impl_at(values, position));
    __builtin_prefetch(impl);
    __builtin_prefetch(impl + kKeysAt);
  }
}

// Whether code has set attributes on a tensor.
bool has_attributes(PyObject* tensor) {
  auto names = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(tensor, nullptr));
  if (!names) throw py::error_already_set();
  return PyDict_GET_SIZE(names.ptr()) != 0;
}

}  // namespace

uint8_t gradient_flags_of(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr) return 0;  // autograd has never met it
  uint8_t flags = 0;
  if (meta->grad_.defined()) flags |= kHasGradient;
  if (!meta->hooks_.empty()) flags |= kHasHooks;
  if (meta->post_acc_grad_hooks_ != nullptr) flags |= kHasLaterHooks;
  if (meta->is_view_ || meta->grad_fn_ != nullptr) {  // a view may have a newer gradient function than it knows
    if (tensor.requires_grad()) flags |= kWantsGradient;
    if (!tensor.is_leaf()) flags |= kIsNoLeaf;
  } else if (meta->requires_grad_) {
    flags |= kWantsGradient;
  }
  return flags;
}

// [Note: modes] Everything that `at::ThreadLocalState` carries to another thread, and the settings of `at::Context` that
// a CPU kernel or a composite op asks for: a setting that is missing here would be frozen in a capture.
static uint64_t settings() {
  auto& context = at::globalContext();
  auto& autograd = c10::AutogradState::get_tls_state();
  const bool flags[] = {
      autograd.get_grad_mode(), autograd.get_inference_mode(), autograd.get_fw_grad_mode(),
      autograd.get_multithreading_enabled(), autograd.get_view_replay_enabled(),
      torch::autograd::AnomalyMode::is_enabled(), torch::autograd::AnomalyMode::should_check_nan(),
      at::SavedTensorDefaultHooks::is_enabled(), at::autocast::is_autocast_enabled(at::kCPU),
      at::autocast::is_autocast_cache_enabled(), context.deterministicAlgorithms(),
      context.deterministicAlgorithmsWarnOnly(), context.deterministicFillUninitializedMemory(),
      context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(), context.userEnabledMathSDP(),
      context.userEnabledCuDNNSDP(), context.userEnabledOverrideableSDP(), context.allowFP16BF16ReductionMathSDP(),
      context.userEnabledMkldnn(), context.deterministicMkldnn(), context.userEnabledNNPACK(),
      context.allowFP16ReductionCPU(), flushes_denormals()};
  uint64_t bits = 0;
  for (bool flag : flags) bits = bits << 1 | static_cast<uint64_t>(flag);
  bits = bits << 8 | static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCPU));
  bits = bits << 8 | static_cast<uint64_t>(c10::get_default_dtype_as_scalartype());
  bits = bits << 2 | static_cast<uint64_t>(casts_around());
  return bits << 2 | static_cast<uint64_t>(at::impl::PythonTorchFunctionTLS::get_disabled_state());
}

py::tuple settings_and_keys() {
  auto keys = c10::impl::tls_local_dispatch_key_set();
  return py::make_tuple(settings(), keys.included_.raw_repr(), keys.excluded_.raw_repr());
}

static bool are_modes_plain() {
  if (at::impl::PythonTorchFunctionTLS::stack_len() || c10::impl::TorchDispatchModeTLS::stack_len()) return false;
  if (at::SavedTensorDefaultHooks::get_hooks(true).has_value()) return false;
  // The transforms of torch.func include keys. Autocast and inference mode do, too, and have flags of their own.
  constexpr c10::DispatchKeySet theirs = c10::autocast_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
  auto keys = c10::impl::tls_local_dispatch_key_set();
  return keys.included_ - theirs == c10::default_included_set - theirs &&
      keys.excluded_ - theirs == c10::default_excluded_set - theirs;
}

int64_t plain_modes() { return are_modes_plain() ? static_cast<int64_t>(settings()) : -1; }

py::object take_arguments(const py::tuple& arguments) {
  if (!are_modes_plain() || c10::InferenceMode::is_enabled()) return py::none();
  size_t size = arguments.size();
  py::list leaves(size);
  py::tuple kind(size + 1);
  kind[0] = size;
  std::vector<const Handle*> handles(size, nullptr);
  for (size_t i = 0; i < size; ++i) {
    PyObject* given = PyTuple_GET_ITEM(arguments.ptr(), i);
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(given));
    auto leaf = py::reinterpret_borrow<py::object>(given);
    if (type == THPVariableClass || type == ParameterClass) {
      for (size_t j = 0; j < i; ++j) {  // one tensor that is given twice stays one
        if (PyTuple_GET_ITEM(arguments.ptr(), j) == given) leaf = leaves[j];
      }
      if (has_attributes(given)) return py::none();
      if (THPVariable_Unpack(leaf.ptr()).is_cpu()) {
        at::Tensor moved = copy_plain_from_host(THPVariable_Unpack(given));
        if (!moved.defined()) return py::none();
        leaf = py::reinterpret_steal<py::object>(THPVariable_Wrap(moved));
      }
      LazyImpl* lazy = as_lazy(THPVariable_Unpack(leaf.ptr()).unsafeGetTensorImpl());
      if (lazy == nullptr) return py::none();
      handles[i] = lazy->handle().get();
      size_t first = std::find(handles.begin(), handles.begin() + static_cast<ptrdiff_t>(i), handles[i]) - handles.begin();
      kind[i + 1] = py::make_tuple(none_if_null(lazy->handle()->type->at_zero()->python), lazy->requires_grad(), first);
    } else if (PyFloat_CheckExact(given)) {
      kind[i + 1] = py::make_tuple(py::handle(type));
    } else if (PyLong_CheckExact(given) || PyBool_Check(given) || PyUnicode_CheckExact(given) || given == Py_None) {
      kind[i + 1] = py::make_tuple(py::handle(type), leaf);
    } else {
      return py::none();
    }
    leaves[i] = std::move(leaf);
  }
  return py::make_tuple(std::move(leaves), std::move(kind));
}

TensorFlags::TensorFlags(std::vector<size_t> positions, const std::string& flags, const std::string& ignored) {
  TORCH_CHECK(flags.size() == positions.size() && ignored.size() == positions.size(), "a byte per tensor");
  for (size_t i = 0; i < positions.size(); ++i) {
    auto counted = static_cast<uint8_t>(~ignored[i]);
    expected_.push_back({positions[i], static_cast<uint8_t>(flags[i] & counted), counted});
    size_ = std::max(size_, positions[i] + 1);
  }
}

bool TensorFlags::hold(const py::list& values) const {
  TORCH_CHECK(values.size() >= size_, "a value is missing");
  for (const Expected& one : expected_) __builtin_prefetch(PyList_GET_ITEM(values.ptr(), one.position));
  for (const Expected& one : expected_) __builtin_prefetch(impl_at(values, one.position));
  for (const Expected& one : expected_) {
    auto* impl = impl_at(values, one.position);
    if (impl == nullptr) return false;
    const char* meta = reinterpret_cast<const char*>(impl->autograd_meta());
    __builtin_prefetch(meta);
    __builtin_prefetch(meta + 64);
    __builtin_prefetch(meta + 128);
  }
  for (const Expected& one : expected_) {
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(values.ptr(), one.position));
    if ((gradient_flags_of(tensor) & one.counted) != one.flags) return false;
  }
  return true;
}

Layout::Layout(
    std::vector<int64_t> inputs, const std::vector<std::tuple<py::object, int64_t, int64_t>>& outputs,
    std::vector<int64_t> written)
    : inputs(std::move(inputs)), written(std::move(written)) {
  for (const auto& [type, number, nbytes] : outputs) {
    this->outputs.push_back({type_from_python(type.ptr()), number, nbytes});
    num_storages = std::max(num_storages, number + 1);
  }
  for (int64_t number : this->inputs) num_storages = std::max(num_storages, number + 1);
}

State::State(
    Layout layout, std::vector<size_t> tensors, std::vector<std::pair<size_t, size_t>> arguments)
    : layout_(std::move(layout)), tensors_(std::move(tensors)), arguments_(std::move(arguments)) {}

bool State::has_handles(const py::list& values) const {
  if (!bound_ || handles_.size() != tensors_.size()) return false;
  for (size_t position : tensors_) {
    if (position >= values.size()) return false;
  }
  fetch(values, tensors_);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    auto* impl = impl_at(values, tensors_[i]);
    LazyImpl* lazy = impl == nullptr ? nullptr : as_lazy(impl);
    if (lazy == nullptr || lazy->handle() != handles_[i]) return false;
  }
  return true;
}

py::object State::given(const py::list& values, const py::list& leaves) const {
  if (!has_handles(values)) return py::none();
  py::list given(arguments_.size());
  std::vector<const Memory*> seen;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const auto& [position, number] = arguments_[i];
    if (number >= leaves.size()) return py::none();
    auto* impl = impl_at(leaves, number);
    LazyImpl* lazy = impl == nullptr ? nullptr : as_lazy(impl);
    if (lazy == nullptr) return py::none();
    const Memory* memory = lazy->handle()->memory.get();
    if (bound_->known.count(memory) || std::find(seen.begin(), seen.end(), memory) != seen.end()) return py::none();
    seen.push_back(memory);
    given[i] = py::make_tuple(position, lazy->handle());
  }
  return given;
}

void State::remember(const py::list& values, const std::vector<Ptr<Handle>>& inputs) {
  TORCH_CHECK(inputs.size() == layout_.inputs.size(), "a program has ", layout_.inputs.size(), " inputs");
  auto bound = std::make_shared<Bound>();
  bound->inputs = inputs;
  bound->memories.resize(layout_.num_storages);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i]) continue;
    bound->memories[layout_.inputs[i]] = inputs[i]->memory;
    bound->known.insert(inputs[i]->memory.get());
    bound->has_offset |= inputs[i]->type->offset > 0;
    inputs[i]->pristine = false;
  }
  bound->written = std::make_shared<Written>();
  for (int64_t number : layout_.written) {
    if (const auto& memory = bound->memories.at(number)) bound->written->memories.emplace_back(number, memory);
  }
  std::vector<Ptr<Handle>> handles;
  for (size_t position : tensors_) {
    auto* impl = position < values.size() ? impl_at(values, position) : nullptr;
    LazyImpl* lazy = impl == nullptr ? nullptr : as_lazy(impl);
    if (lazy == nullptr) break;  // a sparse one: `has_handles` will always look closer
    handles.push_back(lazy->handle());
  }
  handles_.swap(handles);
  bound_.swap(bound);
}

py::object State::tensors() const {
  if (!bound_ || bound_->has_offset) return py::none();
  py::list found(bound_->inputs.size());
  for (size_t i = 0; i < bound_->inputs.size(); ++i) {
    const auto& handle = bound_->inputs[i];
    if (handle && (handle->memory->has_error || !handle->value().defined())) return py::none();
    found[i] = handle ? py::cast(handle->tensor) : py::none();
  }
  return found;
}

Handles BoundInputs::all() const {
  Handles found{bound->inputs};
  for (const auto& [position, handle] : given) found.handles[position] = handle;
  return found;
}

py::list BoundInputs::tensors() const { return all().tensors(); }

std::vector<Ptr<Handle>> BoundInputs::suspects() const { return all().suspects(); }

Binding::Binding(const State& state, Given given)
    : inputs(std::make_shared<BoundInputs>()), outputs(std::make_shared<Handles>()), bound_(state.bound()) {
  TORCH_CHECK(bound_, "the state has not been read yet");
  const Layout& layout = state.layout();
  std::vector<std::pair<int64_t, Ptr<Memory>>> own;  // memory that is no state, by storage number
  auto find = [&](int64_t number) -> Ptr<Memory> {
    for (const auto& [one, memory] : own) {
      if (one == number) return memory;
    }
    return bound_->memories[number];
  };
  bool is_moved = bound_->has_offset;
  for (const auto& [position, handle] : given) {
    own.emplace_back(layout.inputs.at(position), handle->memory);
    is_moved |= handle->type->offset > 0;
  }
  inputs->bound = bound_;
  inputs->given = std::move(given);
  std::unordered_map<Memory*, int64_t> origins;  // see [Note: offsets] in recorder.h
  if (is_moved) origins = origins_of(inputs->all().handles);
  for (const auto& [type, number, nbytes] : layout.outputs) {
    Ptr<Memory> memory = find(number);
    if (!memory) own.emplace_back(number, memory = c10::make_intrusive<Memory>(nbytes));
    auto origin = origins.find(memory.get());
    Ptr<Type> there = type;
    if (origin != origins.end() && origin->second > 0) {
      there = type_at(*type, type->offset + origin->second / static_cast<int64_t>(c10::elementSize(type->dtype)));
    }
    outputs->handles.push_back(c10::make_intrusive<Handle>(std::move(there), std::move(memory)));
  }
  written = bound_->written;
  if (layout.written.size() == written->memories.size()) return;
  written = std::make_shared<Written>(*bound_->written);
  for (int64_t number : layout.written) {
    if (bound_->memories[number]) continue;
    own_written_.push_back(find(number));
    written->memories.emplace_back(number, own_written_.back());
  }
}

void Binding::commit(const py::object& run) {
  Commit commit(run);
  for (const auto& [position, handle] : inputs->given) handle->pristine = false;
  if (!bound_->box || bound_->box->num_places != bound_->num_boxed) {
    bound_->box = c10::make_intrusive<PyBox>(run.ptr());
    for (const auto& [number, memory] : bound_->written->memories) commit.set(*memory, bound_->box);
    bound_->num_boxed = bound_->box->num_places;
  } else {
    commit.set(*bound_->box, run);
  }
  for (const auto& memory : own_written_) commit.set(*memory);
  for (const auto& handle : outputs->handles) {
    commit.set(*handle);
    commit.set(*handle->memory);
  }
}

py::object Binding::own_tensors() const {
  for (const auto& memory : own_written_) {
    if (memory->snapshots) return py::none();
  }
  if (num_snapshotted) {
    for (const auto& [number, memory] : bound_->written->memories) __builtin_prefetch(memory.get());
    for (const auto& [number, memory] : bound_->written->memories) {
      if (memory->snapshots) return py::none();
    }
  }
  if (bound_->num_damages != num_damages) {
    for (const auto& handle : bound_->inputs) {
      if (handle && handle->memory->has_error) return py::none();
    }
    bound_->num_damages = num_damages;
  }
  py::list found(inputs->given.size());
  for (size_t i = 0; i < inputs->given.size(); ++i) {
    const auto& handle = inputs->given[i].second;
    if (!handle->tensor.defined() || handle->type->offset > 0 || handle->memory->has_error) return py::none();
    found[i] = py::cast(handle->tensor);
  }
  return found;
}

Counts::Counts(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  TORCH_CHECK(!tensors_.empty(), "a count has a tensor");
  dtype_ = tensors_[0].scalar_type();
}

py::object Counts::read() const {
  for (const at::Tensor& tensor : tensors_) __builtin_prefetch(tensor.unsafeGetTensorImpl());
  const char* first = nullptr;
  size_t size = c10::elementSize(dtype_);
  for (const at::Tensor& tensor : tensors_) {
    // The user may have given it other memory, or another type, by `.data = ...`.
    if (tensor.scalar_type() != dtype_ || tensor.numel() != 1 || !tensor.is_cpu()) return py::none();
    const char* number = static_cast<const char*>(tensor.const_data_ptr());
    if (first == nullptr) first = number;
    if (std::memcmp(first, number, size) != 0) return py::none();
  }
  switch (dtype_) {
    case at::kFloat:
      return py::float_(*reinterpret_cast<const float*>(first));
    case at::kDouble:
      return py::float_(*reinterpret_cast<const double*>(first));
    case at::kLong:
      return py::int_(*reinterpret_cast<const int64_t*>(first));
    default:
      return py::none();
  }
}

void Counts::write(const py::object& number) const {
  char bytes[sizeof(double)];
  size_t size = c10::elementSize(dtype_);
  if (dtype_ == at::kLong) {
    int64_t value = PyLong_AsLongLong(number.ptr());
    std::memcpy(bytes, &value, size);
  } else {
    double value = PyFloat_AsDouble(number.ptr());
    auto rounded = static_cast<float>(value);
    std::memcpy(bytes, dtype_ == at::kFloat ? static_cast<void*>(&rounded) : &value, size);
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  for (const at::Tensor& tensor : tensors_) std::memcpy(tensor.data_ptr(), bytes, size);
}

}  // namespace lazystep
