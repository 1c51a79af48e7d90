// The runtime side of a value: a `Handle` per tensor value, a `Memory` per group of tensors that
// share memory, and `LazyImpl`, the tensor on `device="lazy"` that carries a value.
//
// Nothing here holds memory for elements. A `Memory` is a storage without data, so that torch's own
// questions (do these two share memory? how large is it?) get true answers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <limits>

#include "python_ref.h"

namespace lazystep {

template <typename T>
using Ptr = c10::intrusive_ptr<T>;

inline c10::Device lazy_device() { return {c10::DeviceType::Lazy, 0}; }

// A `TensorType` of the program, unpacked. One per Python object, so that comparing addresses is
// comparing types.
struct Type : c10::intrusive_ptr_target {
  PyRef python;
  at::ScalarType dtype = at::ScalarType::Undefined;
  bool is_strided = true;
  bool conj = false;
  bool neg = false;
  int64_t offset = 0;
  c10::SmallVector<int64_t, 5> shape;
  c10::SmallVector<int64_t, 5> stride;
  c10::intrusive_ptr<Type> based;  // the same at offset zero; null if this one is

  // The same at offset zero.
  const Type* at_zero() const { return based ? based.get() : this; }
  int64_t byte_offset() const { return offset * static_cast<int64_t>(c10::elementSize(dtype)); }

  ~Type() override { forget(); }
  // Here, too: a thread that drops a weak reference under a lock may free the struct later.
  void release_resources() override { forget(); }

 private:
  void forget();
};

// The type of a Python `TensorType`. Needs the GIL.
Ptr<Type> type_from_python(PyObject* tensor_type);

// The type of a real, strided tensor. Takes the GIL for a type that nothing uses yet.
Ptr<Type> type_of(const at::Tensor& tensor);

// A type like this one in another place of its memory, or with another shape. As above, any thread.
Ptr<Type> type_at(const Type& type, c10::IntArrayRef shape, c10::IntArrayRef stride, int64_t offset);
inline Ptr<Type> type_at(const Type& type, int64_t offset) { return type_at(type, type.shape, type.stride, offset); }

// A Python object whose references can be copied without the GIL.
struct PyBox : c10::intrusive_ptr_target {
  explicit PyBox(PyObject* object) : python(PyRef::borrow(object)) {}
  PyRef python;
  std::atomic<int64_t> num_places{0};  // memory whose run it holds: see [Note: one box] in replay.h
};

// Recordings are known by number, never by address: zero is no recording.
using RecordingId = uint64_t;

// How many there are, for tests that look for growth.
inline std::atomic<int64_t> num_handles{0};
inline std::atomic<int64_t> num_memories{0};
// How much memory has snapshots now, and how often a failed step has left memory half updated.
inline std::atomic<int64_t> num_snapshotted{0};
inline std::atomic<int64_t> num_damages{0};

// Memory that values are views of. Fields without a comment belong to the recorder's lock.
struct Memory : c10::StorageImpl {
  explicit Memory(int64_t nbytes)
      : StorageImpl(use_byte_size_t(), nbytes, c10::DataPtr(nullptr, lazy_device()), nullptr, false) {
    ++num_memories;
  }
  ~Memory() override { --num_memories; }

  RecordingId recording = 0;  // that uses it now, as its storage `number`
  int64_t number = -1;
  RecordingId writer = 0;  // that has recorded a write into it
  // Of the inputs of that recording in this memory: the place of the first and the least, in bytes, and the size of
  // an element of the first. See [Note: offsets] in recorder.h.
  int64_t first_offset = 0, least_offset = 0, itemsize = 0;
  // Whether a tensor in this memory has got another shape in place. Any thread.
  std::atomic<bool> has_rebound{false};
  // Set when a failed step left it half updated. Read without the GIL, hence apart from the error.
  std::atomic<bool> has_error{false};
  // Under the GIL:
  PyRef error;
  PyRef snapshots;
  int64_t address = 0;  // what `data_ptr` shows, given at the first question
  const Ptr<PyBox>& run() const { return run_; }  // the last queued step that makes or writes it
  // Returns the box that it had. To be dropped without the recorder's lock.
  Ptr<PyBox> set_run(Ptr<PyBox> box) {
    if (box) ++box->num_places;
    if (run_) --run_->num_places;
    run_.swap(box);
    return box;
  }

  void release_resources() override;

 private:
  Ptr<PyBox> run_;
};

// A tensor value: its type, its memory and, once it has been computed, its real tensor.
struct Handle : c10::intrusive_ptr_target {
  Handle(Ptr<Type> type, Ptr<Memory> memory) : type(std::move(type)), memory(std::move(memory)) { ++num_handles; }
  ~Handle() override { --num_handles; }

  Ptr<Type> type;
  Ptr<Memory> memory;
  // Under the recorder's lock: its number in the recording that made it or uses it now.
  RecordingId recording = 0;
  int64_t index = -1;
  bool is_made = false;  // by that recording; otherwise it is an input of it
  // Allocated by `empty`, and nothing has been recorded with it: the host may fill it directly.
  std::atomic<bool> pristine{false};
  // Under the GIL:
  at::Tensor tensor;
  Ptr<PyBox> run;  // the queued step that computes it; none for a value from the host
  // Of a view that no instruction makes: the value that it is a view of. Set when it is made. See [Note: windows] in
  // kernel.cpp.
  c10::intrusive_ptr<Handle> base;

  // The real tensor, undefined as long as it is not computed. A view gets it from its base. Needs the GIL.
  const at::Tensor& value();
  const Ptr<PyBox>& maker() const { return base ? base->run : run; }

  // The recording keeps a weak reference to what it made, and so the memory of this struct until
  // the barrier; what it points to must go when the last tensor does.
  void release_resources() override;
};

// What `t_`, `unsqueeze_`, `.data = ...` and others have done to a tensor, as far as autograd has to know. A view takes over
// the values of the tensor that it is a view of. See [Note: stale views] in kernel.cpp.
struct Rebinds {
  // How often the base has got another shape or other strides in place. In a view: when it was made.
  int32_t num_of_base = 0;
  // In a view that has got another shape in place, and in views of it: its version then. -1: it has not.
  int64_t version = -1;
  // The version of a view that has got another shape while autograd did not look. No tensor ever has it.
  static constexpr int64_t kUnseen = std::numeric_limits<int64_t>::max();
};

// Whether any tensor has ever got another shape or other strides in place.
inline std::atomic<bool> has_rebound{false};

// A tensor on the lazy device.
struct LazyImpl final : c10::TensorImpl {
  explicit LazyImpl(Ptr<Handle> handle);
  // A view of `base`, which decides whether autograd watches it: a view of an ordinary tensor that
  // is made under inference mode is an ordinary tensor.
  LazyImpl(Ptr<Handle> handle, const LazyImpl& base);

  const Ptr<Handle>& handle() const { return handle_; }
  // Stand for another value, as `t_` and `resize_` do. `is_out`: as the `out=` of an op, which autograd never records.
  void retype(Ptr<Handle> handle, bool is_out = false);
  const Rebinds& rebinds() const { return rebinds_; }
  // A new view counts as one that got its shape in place at this version of its memory.
  void note_view_of_memory(int64_t version);

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version_counter, bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) override;

 private:
  void take_metadata();
  void note_rebind(const Handle& old, bool is_written, bool is_out = false);

  Ptr<Handle> handle_;
  Rebinds rebinds_;
};

// The lazy tensor behind an impl, or null. A sparse lazy tensor is of a Python class and has no LazyImpl.
inline LazyImpl* as_lazy(c10::TensorImpl* impl) {
  auto keys = impl->key_set();
  bool ours = keys.has_all(c10::DispatchKeySet(c10::DispatchKey::Lazy)) && !keys.has(c10::DispatchKey::Python);
  return ours ? static_cast<LazyImpl*>(impl) : nullptr;
}

inline at::Tensor make_view(Ptr<Handle> handle, const LazyImpl& base) {
  return at::detail::make_tensor<LazyImpl>(std::move(handle), base);
}

inline at::Tensor make_tensor(Ptr<Handle> handle) {
  return at::detail::make_tensor<LazyImpl>(std::move(handle));
}

}  // namespace lazystep
