// A reference to a Python object that may be dropped on any thread.
//
// Tensors die wherever autograd drops them, mostly without the GIL. Dropping a reference takes the
// GIL, so it never happens while the recorder's lock is held: see [Note: locks] in recorder.h.
#pragma once

#include <Python.h>

#include <utility>

namespace lazystep {

class PyRef {
 public:
  PyRef() = default;
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  PyRef(const PyRef&) = delete;
  PyRef& operator=(const PyRef&) = delete;
  ~PyRef() {
    if (object_ == nullptr || !Py_IsInitialized()) return;
    if (PyGILState_Check()) {
      Py_DECREF(object_);
    } else {
      PyGILState_STATE state = PyGILState_Ensure();
      Py_DECREF(object_);
      PyGILState_Release(state);
    }
  }

  // Needs the GIL.
  static PyRef borrow(PyObject* object) {
    PyRef ref;
    Py_XINCREF(object);
    ref.object_ = object;
    return ref;
  }

  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

}  // namespace lazystep
