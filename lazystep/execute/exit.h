// The end of a process in which a thread is still at work.
//
// [Note: exit]
// The executor thread and the closure worker get until a deadline. One that is still busy then outlives the
// interpreter, and two things would end the process with SIGABRT or SIGSEGV, whatever its exit status was to be:
// - Before 3.14, Python ends a thread that asks for the interpreter lock too late with `pthread_exit`, which unwinds
//   its stack. After an op of torch's, or a run of a library, the lock is taken in a destructor, and unwinding out
//   of a destructor calls `std::terminate`. So the thread sleeps there, as Python 3.14 lets it do: nobody needs it.
// - `exit` destroys the global objects of torch, such as its table of ops, under a kernel that runs. So the process
//   ends before that, with its exit status and with everything written that was printed.
#pragma once

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

namespace lazystep {

inline pthread_t exiting_thread;
inline std::terminate_handler handler_before = nullptr;

inline bool is_interpreter_ending() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() || !Py_IsInitialized();
#else
  return _Py_IsFinalizing() || !Py_IsInitialized();
#endif
}

[[noreturn]] inline void sleep_or_terminate() {
  // An exception that nobody catches is a failure, at the end, too. `pthread_exit` unwinds with none of C++'s.
  const bool is_too_late = is_interpreter_ending() && !std::current_exception();
  while (is_too_late && !pthread_equal(pthread_self(), exiting_thread)) pause();
  if (handler_before != nullptr) handler_before();
  std::abort();
}

// Let threads outlive the interpreter without harm. `is_busy`: one of them is at work, perhaps in a kernel. For the
// thread that ends the process, and only once it is about to do so.
inline void prepare_exit(bool is_busy) {
  exiting_thread = pthread_self();
  if (std::get_terminate() != &sleep_or_terminate) handler_before = std::set_terminate(&sleep_or_terminate);
#ifdef __GLIBC__
  auto leave = [](int status, void*) {
    std::fflush(nullptr);
    _exit(status);
  };
  if (is_busy) on_exit(leave, nullptr);
#endif
}

}  // namespace lazystep
