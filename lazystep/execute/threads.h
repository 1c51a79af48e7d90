// How the executor thread sleeps, and how another thread runs a step in its place.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

namespace lazystep {

namespace py = pybind11;

// Wakes one sleeping thread, at once or after a head start. A thread that sleeps here, or whose bell is
// stopped before the head start is over, never asks for the interpreter lock.
class Bell {
 public:
  void ring(double delay) {
    std::lock_guard<std::mutex> lock(mutex_);
    due_ = Clock::now() + to_duration(delay);
    changed_.notify_one();
  }

  // Take back a ring that nobody has heard. False if it has been heard, or there was none.
  bool stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    bool was_ringing = due_.has_value();
    due_.reset();
    return was_ringing;
  }

  // Sleep until it rings. False after `timeout` seconds. Needs the interpreter lock, and gives it up.
  bool wait(std::optional<double> timeout) {
    py::gil_scoped_release no_lock;
    std::unique_lock<std::mutex> lock(mutex_);
    std::optional<Clock::time_point> deadline;
    if (timeout) deadline = Clock::now() + to_duration(*timeout);
    while (true) {
      auto now = Clock::now();
      if (due_ && *due_ <= now) {
        due_.reset();
        return true;
      }
      if (deadline && *deadline <= now) return false;
      if (!due_ && !deadline) {
        changed_.wait(lock);
      } else {
        changed_.wait_until(lock, !deadline ? *due_ : !due_ ? *deadline : std::min(*due_, *deadline));
      }
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static Clock::duration to_duration(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Clock::time_point> due_;
};

// Calls a function with what torch keeps per thread (modes, excluded dispatch keys, whether gradients are on)
// as it was where `state` was taken. Warnings of kernels are printed, as the executor thread prints them: the call
// of torch's that waits, such as `tolist`, would raise them as its own.
inline py::object call_with(const at::ThreadLocalState& state, const py::function& function) {
  at::ThreadLocalStateGuard guard(state);
  static c10::WarningHandler printing;
  c10::WarningUtils::WarningHandlerGuard no_python(&printing);
  return function();
}

}  // namespace lazystep
