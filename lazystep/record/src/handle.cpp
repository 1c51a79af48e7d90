#include "handle.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <string>
#include <unordered_map>

namespace lazystep {

namespace {

// Weak, under the GIL: a type leaves when nothing uses it, as its Python counterpart does.
std::unordered_map<PyObject*, Type*>& types() {
  static auto* table = new std::unordered_map<PyObject*, Type*>;  // never destroyed: types outlive it
  return *table;
}

}  // namespace

void Type::forget() {
  if (!python || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  auto found = types().find(python.get());
  if (found != types().end() && found->second == this) types().erase(found);
  PyRef dropped = std::move(python);
}

Ptr<Type> type_from_python(PyObject* tensor_type) {
  auto found = types().find(tensor_type);
  if (found != types().end()) {
    // Another thread may be about to destroy it, waiting for the GIL that we hold.
    auto weak = c10::weak_intrusive_ptr<Type>::reclaim_copy(found->second);
    if (auto strong = weak.lock()) return strong;
  }
  auto object = py::reinterpret_borrow<py::object>(tensor_type);
  auto type = c10::make_intrusive<Type>();
  type->python = PyRef::borrow(tensor_type);
  type->dtype = reinterpret_cast<THPDtype*>(object.attr("dtype").ptr())->scalar_type;
  type->is_strided =
      reinterpret_cast<THPLayout*>(object.attr("layout").ptr())->layout == c10::Layout::Strided;
  type->conj = object.attr("conj").cast<bool>();
  type->neg = object.attr("neg").cast<bool>();
  type->offset = object.attr("offset").cast<int64_t>();
  for (auto size : object.attr("shape")) type->shape.push_back(size.cast<int64_t>());
  for (auto step : object.attr("stride")) type->stride.push_back(step.cast<int64_t>());
  if (type->offset != 0) type->based = type_from_python(object.attr("at")(0).ptr());
  types()[tensor_type] = type.get();
  return type;
}

namespace {

// The type with these fields. `make` is called with the GIL for a type that nothing uses yet.
template <typename Make>
Ptr<Type> find_type(
    at::ScalarType dtype, bool conj, bool neg, int64_t offset, c10::IntArrayRef shape, c10::IntArrayRef stride,
    const Make& make) {
  static auto* mutex = new std::mutex;
  static auto* known = new std::unordered_map<std::string, c10::weak_intrusive_ptr<Type>>;
  static size_t sweep_at = 1024;

  c10::SmallVector<int64_t, 16> words{static_cast<int64_t>(dtype), conj, neg, offset};
  words.append(shape.begin(), shape.end());
  words.append(stride.begin(), stride.end());
  std::string key(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t));
  {
    std::lock_guard lock(*mutex);
    auto found = known->find(key);
    if (found != known->end()) {
      if (auto type = found->second.lock()) return type;
    }
  }
  Ptr<Type> type;
  {
    py::gil_scoped_acquire gil;
    py::object python = make();
    type = type_from_python(python.ptr());
  }
  std::lock_guard lock(*mutex);
  if (known->size() >= sweep_at) {
    for (auto it = known->begin(); it != known->end();) it = it->second.expired() ? known->erase(it) : ++it;
    sweep_at = std::max<size_t>(1024, 2 * known->size());
  }
  known->insert_or_assign(std::move(key), c10::weak_intrusive_ptr<Type>(type));
  return type;
}

py::tuple to_python(c10::IntArrayRef numbers) {
  py::tuple tuple(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) tuple[i] = numbers[i];
  return tuple;
}

}  // namespace

Ptr<Type> type_of(const at::Tensor& tensor) {
  return find_type(
      tensor.scalar_type(), tensor.is_conj(), tensor.is_neg(), tensor.storage_offset(), tensor.sizes(),
      tensor.strides(), [&] { return py::module_::import("lazystep.program.types").attr("type_of")(tensor); });
}

Ptr<Type> type_at(const Type& type, c10::IntArrayRef shape, c10::IntArrayRef stride, int64_t offset) {
  return find_type(type.dtype, type.conj, type.neg, offset, shape, stride, [&] {
    py::object like = py::reinterpret_borrow<py::object>(type.python.get());
    return like.attr("at")(offset, to_python(shape), to_python(stride));
  });
}

void Memory::release_resources() {
  StorageImpl::release_resources();
  PyRef dropped_error = std::move(error), dropped_snapshots = std::move(snapshots);
  if (dropped_snapshots) --num_snapshotted;
  set_run(nullptr);
}

const at::Tensor& Handle::value() {
  if (!tensor.defined() && base && base->value().defined()) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    tensor = base->tensor.as_strided(type->shape, type->stride, type->offset);
  }
  return tensor;
}

void Handle::release_resources() {
  tensor.reset();
  run.reset();
  base.reset();
  type.reset();
  memory.reset();
}

LazyImpl::LazyImpl(Ptr<Handle> handle)
    : TensorImpl(
          c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(handle->memory)),
          c10::DispatchKeySet(c10::DispatchKey::Lazy),
          c10::scalarTypeToTypeMeta(handle->type->dtype)),
      handle_(std::move(handle)) {
  take_metadata();
}

LazyImpl::LazyImpl(Ptr<Handle> handle, const LazyImpl& base)
    : TensorImpl(
          c10::TensorImpl::VIEW,
          c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(handle->memory)),
          base.key_set(),
          c10::scalarTypeToTypeMeta(handle->type->dtype)),
      handle_(std::move(handle)),
      rebinds_(base.rebinds_) {
  take_metadata();
}

void LazyImpl::take_metadata() {
  const Type& type = *handle_->type;
  sizes_and_strides_.set_sizes(type.shape);
  for (size_t i = 0; i < type.stride.size(); ++i) {
    sizes_and_strides_.stride_at_unchecked(i) = type.stride[i];
  }
  storage_offset_ = type.offset;
  refresh_numel();
  refresh_contiguous();
  if (type.conj != is_conj()) _set_conj(type.conj);
  if (type.neg != is_neg()) _set_neg(type.neg);
}

// `is_written`: by an op that tells autograd so afterwards. `.data = ...` does not.
void LazyImpl::note_rebind(const Handle& old, bool is_written, bool is_out) {
  const at::Tensor tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(this));
  auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view == nullptr || !view->has_bw_view()) {
    ++rebinds_.num_of_base;
  } else if (is_written && (is_out || !at::GradMode::is_enabled())) {
    rebinds_.version = Rebinds::kUnseen;
  } else if (is_written) {
    rebinds_.version = tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version()) + 1;
  } else {
    // Autograd keeps the gradient function of that version, and makes another for any later one.
    rebinds_.version = view->get_attr_version();
  }
  old.memory->has_rebound = handle_->memory->has_rebound = has_rebound = true;
}

void LazyImpl::note_view_of_memory(int64_t version) {
  if (rebinds_.version >= 0) return;
  rebinds_.version = version;
  has_rebound = true;
}

void LazyImpl::retype(Ptr<Handle> handle, bool is_out) {
  bool is_same = handle->type == handle_->type;
  Ptr<Handle> old = std::exchange(handle_, std::move(handle));
  storage_ = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(handle_->memory));
  data_type_ = c10::scalarTypeToTypeMeta(handle_->type->dtype);
  take_metadata();
  if (!is_same) note_rebind(*old, true, is_out);
}

c10::intrusive_ptr<c10::TensorImpl> LazyImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version_counter, bool allow_tensor_metadata_change) const {
  auto copy = c10::make_intrusive<LazyImpl>(handle_);
  copy->rebinds_ = rebinds_;
  copy_tensor_metadata(this, copy.get(), version_counter, allow_tensor_metadata_change);
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> LazyImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const {
  auto copy = c10::make_intrusive<LazyImpl>(handle_);
  copy->rebinds_ = rebinds_;
  copy_tensor_metadata(this, copy.get(), std::move(version_counter), allow_tensor_metadata_change);
  return copy;
}

void LazyImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) {
  auto* other = as_lazy(impl.get());
  TORCH_INTERNAL_ASSERT(other != nullptr, "a lazy tensor can take over another lazy tensor only");
  copy_tensor_metadata(other, this, version_counter(), allow_tensor_metadata_change());
  Ptr<Handle> handle = other->handle_;  // a copy: `x.data = x`
  Ptr<Handle> old = std::exchange(handle_, std::move(handle));
  if (old->type != handle_->type) note_rebind(*old, false);
}

}  // namespace lazystep
