// Native steps back to back on the executor thread, without the interpreter lock.
//
// [Note: chain] Each time the executor thread asks for the interpreter lock, a Python thread that computes keeps it
// for up to 5 ms more (`sys.getswitchinterval`): as long as several small steps. So a step that is ready, which means
// that the training thread has checked its tensors and numbers when it queued it, is put into a chain. The executor
// thread takes one ready run after the other from there. It takes the lock only when the chain ends: when a step is
// queued that is not ready, the runs that a thread waits for are over, a run fails, or nothing comes for a while. A run
// that has ended gets its Python side (the handles of its results, counters) from the thread that queues the next step:
// see `Executor._settle`. A thread that waits for places sleeps here until as many runs have ended as it wants, so it
// asks for the lock once, not after each run.
//
// Objects of Python's are touched by constructors alone, which need the interpreter lock.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "communicate.h"
#include "denormals.h"
#include "thread_choice.h"

namespace lazystep {

namespace py = pybind11;

// A library, run without the interpreter lock.
class Library : public torch::inductor::AOTIModelContainerRunnerCpu {
 public:
  explicit Library(const std::string& path) : AOTIModelContainerRunnerCpu(path) {}

  // As `run`, and needs the interpreter lock, which it gives up meanwhile.
  std::vector<at::Tensor> run_for_python(const std::vector<at::Tensor>& arguments) {
    py::gil_scoped_release no_lock;
    auto start = std::chrono::steady_clock::now();
    auto returned = run(arguments);
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return returned;
  }

  double seconds() const { return seconds_; }

 private:
  double seconds_ = 0;  // of the last such run
};

// A library with the tensors that it has been found to fit. Only the executor thread calls it.
struct ReadyCall {
  // `arguments`: all that the library takes, None for tensors that each run has its own of; `own`: examples of these, in
  // the order in which a run gives them, with their number among the arguments. `floats`, `ints`: the tensors with the
  // numbers, and where in a run's list the numbers are. `fixed`: numbers that are part of the library, and their places.
  // `returned`: examples of the results. `threads`: on how many it runs. `agreements`: the groups that it communicates
  // in, and the number of the collectives that their ranks must have agreed on.
  ReadyCall(
      std::shared_ptr<Library> library, const std::vector<std::optional<at::Tensor>>& arguments,
      const std::vector<std::pair<size_t, at::Tensor>>& own, at::Tensor floats, const std::vector<size_t>& floats_at,
      at::Tensor ints, const std::vector<size_t>& ints_at, const std::vector<std::pair<size_t, py::object>>& fixed,
      const std::vector<at::Tensor>& returned, std::shared_ptr<ThreadChoice> threads,
      std::vector<std::pair<std::shared_ptr<Group>, int64_t>> agreements)
      : library(std::move(library)),
        floats(std::move(floats), floats_at),
        ints(std::move(ints), ints_at),
        threads(std::move(threads)),
        agreements(std::move(agreements)) {
    for (const auto& argument : arguments) {
      this->arguments.push_back(argument.value_or(at::Tensor()));
      addresses.push_back(argument ? argument->const_data_ptr() : nullptr);
      if (argument && addresses.back() != nullptr) taken.insert(addresses.back());
    }
    for (const auto& [number, example] : own) this->own.push_back({number, Form(example)});
    for (const auto& [at, value] : fixed) {
      std::pair<size_t, Number> one{at, Number(value.ptr())};
      // The same number may be a part of the library in many places: it is compared once.
      if (std::find(this->fixed.begin(), this->fixed.end(), one) == this->fixed.end()) this->fixed.push_back(one);
    }
    for (const auto& example : returned) this->returned.emplace_back(example);
  }

  // Data type, shape and strides of a dense CPU tensor at the beginning of its memory.
  struct Form {
    explicit Form(const at::Tensor& tensor)
        : dtype(tensor.scalar_type()), sizes(tensor.sizes().vec()), strides(tensor.strides().vec()) {}

    bool fits(const at::Tensor& tensor) const {
      return tensor.scalar_type() == dtype && tensor.is_cpu() && tensor.sizes() == sizes &&
          tensor.strides() == strides && tensor.storage_offset() == 0 && !tensor.is_conj() && !tensor.is_neg();
    }

    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
  };

  // A number as far as it can be compared without Python: other numbers equal nothing.
  struct Number {
    explicit Number(PyObject* value) {
      if (PyFloat_CheckExact(value)) {
        kind = 'f';
        bits = std::bit_cast<int64_t>(PyFloat_AS_DOUBLE(value));
      } else if (PyLong_CheckExact(value) || PyBool_Check(value)) {
        int is_large = 0;
        kind = PyBool_Check(value) ? 'b' : 'i';
        bits = PyLong_AsLongLongAndOverflow(value, &is_large);
        if (is_large) kind = 0;
      }
    }
    bool operator==(const Number& other) const { return kind && kind == other.kind && bits == other.bits; }

    char kind = 0;
    int64_t bits = 0;
  };

  // The numbers that a library takes in one tensor. An optimizer has the same few for every parameter: a run, which the
  // training thread makes, has each once, and the executor thread spreads them.
  struct Numbers {
    Numbers(at::Tensor tensor, const std::vector<size_t>& places) : tensor(std::move(tensor)) {
      for (size_t place : places) {
        size_t which = std::find(distinct.begin(), distinct.end(), place) - distinct.begin();
        if (which == distinct.size()) distinct.push_back(place);
        elements.push_back(which);
      }
    }

    template <typename T>
    void spread(const std::vector<T>& numbers) {
      if (elements.empty()) return;
      T* to = tensor.data_ptr<T>();
      for (size_t which : elements) *to++ = numbers[which];
    }

    at::Tensor tensor;
    std::vector<size_t> distinct;  // places in a run's list
    std::vector<size_t> elements;  // of the tensor: which of the distinct numbers each is
  };

  std::shared_ptr<Library> library;
  std::vector<at::Tensor> arguments;  // undefined for those that each run has its own of
  std::vector<const void*> addresses;
  std::unordered_set<const void*> taken;
  std::vector<std::pair<size_t, Form>> own;
  Numbers floats, ints;
  std::vector<std::pair<size_t, Number>> fixed;
  std::vector<Form> returned;
  std::shared_ptr<ThreadChoice> threads;
  std::vector<std::pair<std::shared_ptr<Group>, int64_t>> agreements;
};

// One run of a library on its own tensors and numbers. Made by the training thread, run by the executor thread, settled
// by either.
class ReadyRun {
 public:
  // Null if the tensors or the numbers are not those that the call is made for.
  static std::shared_ptr<ReadyRun> make(
      std::shared_ptr<ReadyCall> call, const std::vector<at::Tensor>& own, const py::list& numbers) {
    if (own.size() != call->own.size()) return nullptr;
    for (size_t i = 0; i < own.size(); ++i) {
      const void* address = own[i].const_data_ptr();
      if (!call->own[i].second.fits(own[i]) || (address != nullptr && call->taken.count(address))) return nullptr;
      for (size_t j = 0; j < i; ++j) {
        if (address != nullptr && own[j].const_data_ptr() == address) return nullptr;
      }
    }
    auto get = [&](size_t at) {
      TORCH_INTERNAL_ASSERT(at < numbers.size());
      return PyList_GET_ITEM(numbers.ptr(), static_cast<Py_ssize_t>(at));
    };
    for (const auto& [at, expected] : call->fixed) {
      if (!(ReadyCall::Number(get(at)) == expected)) return nullptr;
    }
    auto run = std::make_shared<ReadyRun>();
    run->floats_.reserve(call->floats.distinct.size());
    for (size_t at : call->floats.distinct) run->floats_.push_back(PyFloat_AsDouble(get(at)));
    run->ints_.reserve(call->ints.distinct.size());
    for (size_t at : call->ints.distinct) run->ints_.push_back(PyLong_AsLongLong(get(at)));
    if (PyErr_Occurred()) {  // a number that does not fit: the run in Python says which
      PyErr_Clear();
      return nullptr;
    }
    run->call_ = std::move(call);
    run->own_ = own;
    run->flushes_denormals_ = flushes_denormals();  // of the thread that queues it
    return run;
  }

  // On the executor thread, without the interpreter lock. Whether the next run may follow at once.
  bool execute() {
    auto start = std::chrono::steady_clock::now();
    ReadyCall& call = *call_;
    if (!still_fits()) {
      state_ = State::kRefused;
      return false;
    }
    std::vector<at::Tensor> arguments = call.arguments;
    for (size_t i = 0; i < own_.size(); ++i) arguments[call.own[i].first] = own_[i];
    call.floats.spread(floats_);
    call.ints.spread(ints_);
    int num_threads = call.threads->next();
    if (at::get_num_threads() != num_threads) at::set_num_threads(num_threads);
    if (flushes_denormals() != flushes_denormals_) at::globalContext().setFlushDenormal(flushes_denormals_);
    try {
      returned_ = call.library->run(arguments);
    } catch (const c10::Error& error) {
      error_ = error.what_without_backtrace();
    } catch (const std::exception& error) {
      error_ = error.what();
    }
    if (!call.agreements.empty()) communicated_ = InFlight::get().take();
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!error_.empty()) {
      state_ = State::kFailed;
      return false;
    }
    call.threads->took(seconds_);
    is_as_declared_ = has_declared_results();
    state_ = State::kDone;
    // The rest must be done before the next run writes the memory that a result shares.
    return is_as_declared_;
  }

  bool is_done() const { return state_ == State::kDone; }
  bool has_failed() const { return state_ == State::kFailed; }
  bool is_refused() const { return state_ == State::kRefused; }
  bool is_as_declared() const { return is_as_declared_; }
  const std::string& error() const { return error_; }
  double seconds() const { return seconds_; }
  const Communicated& communicated() const { return communicated_; }
  const std::vector<at::Tensor>& returned() const { return returned_; }
  std::vector<at::Tensor> arguments() const {
    std::vector<at::Tensor> found = call_->arguments;
    for (size_t i = 0; i < own_.size(); ++i) found[call_->own[i].first] = own_[i];
    return found;
  }

 private:
  // `kRefused`: it has not run, since its tensors or groups are not what they were when it was made.
  enum class State { kQueued, kDone, kFailed, kRefused };

  bool still_fits() const {
    const ReadyCall& call = *call_;
    for (size_t i = 0; i < call.arguments.size(); ++i) {
      // Nobody changes the type of a tensor that a handle holds, but a step on the reference may resize it.
      if (call.arguments[i].defined() && call.arguments[i].const_data_ptr() != call.addresses[i]) return false;
    }
    for (const auto& [group, number] : call.agreements) {
      // Another program has communicated in between, or a collective has failed: Python asks the other ranks.
      if (group->agreed() != number) return false;
    }
    return true;
  }

  bool has_declared_results() const {
    if (returned_.size() != call_->returned.size()) return false;
    for (size_t i = 0; i < returned_.size(); ++i) {
      const void* address = returned_[i].const_data_ptr();
      if (!call_->returned[i].fits(returned_[i])) return false;
      if (address == nullptr) continue;
      if (call_->taken.count(address)) return false;
      for (const auto& other : own_) {
        if (other.const_data_ptr() == address) return false;
      }
      for (size_t j = 0; j < i; ++j) {
        if (returned_[j].const_data_ptr() == address) return false;
      }
    }
    return true;
  }

  std::shared_ptr<ReadyCall> call_;
  std::vector<at::Tensor> own_, returned_;
  std::vector<double> floats_;
  std::vector<int64_t> ints_;
  std::string error_;
  Communicated communicated_;
  double seconds_ = 0;
  bool is_as_declared_ = false;
  bool flushes_denormals_ = false;
  std::atomic<State> state_{State::kQueued};
};

// Hands ready runs to the executor thread, and tells when runs, ready or not, have ended.
class Chain {
 public:
  // The executor thread is about to call `run`: these come first. It comes back behind them, unless `stays_open`.
  void open(const std::vector<std::shared_ptr<ReadyRun>>& runs, bool stays_open) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.assign(runs.begin(), runs.end());
    is_open_ = stays_open;
  }

  // False if the chain is not open: then the run waits for its turn in Python.
  bool push(std::shared_ptr<ReadyRun> run) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_open_) return false;
    queue_.push_back(std::move(run));
    changed_.notify_all();
    return true;
  }

  // Let the executor thread come back when the runs in the chain are over.
  void drain() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = false;
    changed_.notify_all();
  }

  // As above, and not later than when this run, which has been put into the chain, is over.
  void end_behind(const std::shared_ptr<ReadyRun>& last) {
    std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = false;
    auto found = std::find(queue_.begin(), queue_.end(), last);
    queue_.erase(found == queue_.end() ? queue_.begin() : found + 1, queue_.end());
    changed_.notify_all();
  }

  // Let the executor thread come back when the present run is over.
  void stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = false;
    queue_.clear();  // their Python side still has them
    changed_.notify_all();
  }

  // Run what is in the chain and what is pushed meanwhile. False if nothing came for `patience` seconds. Needs the
  // interpreter lock, and gives it up.
  bool run(double patience) {
    py::gil_scoped_release no_lock;
    bool is_needed = true;
    while (true) {
      std::shared_ptr<ReadyRun> next;  // dropped without the mutex: it may be the last reference to tensors
      {
        std::unique_lock<std::mutex> lock(mutex_);
        auto is_due = [&] { return !queue_.empty() || !is_open_; };
        is_needed = changed_.wait_for(lock, std::chrono::duration<double>(patience), is_due);
        if (queue_.empty()) {
          is_open_ = false;
          break;
        }
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      bool goes_on = next->execute();
      std::lock_guard<std::mutex> lock(mutex_);
      if (next->is_done()) {
        ++num_unsettled_;
        ++num_run_;
        count_end();
      }
      if (!goes_on) {
        is_open_ = false;
        queue_.clear();
        break;
      }
    }
    ++num_returns_;
    return is_needed;
  }

  // A run that was not ready has ended.
  void note_end() {
    std::lock_guard<std::mutex> lock(mutex_);
    count_end();
  }

  // Block until `num_ended` is at least `wanted`, or for `timeout` seconds. Needs the interpreter lock, and gives it up.
  void wait_for_ends(int64_t wanted, double timeout) {
    py::gil_scoped_release no_lock;
    std::unique_lock<std::mutex> lock(mutex_);
    auto awaited = awaited_.insert(wanted);
    ended_.wait_for(lock, std::chrono::duration<double>(timeout), [&] { return num_ended_ >= wanted; });
    awaited_.erase(awaited);
    ++num_wakes_;
  }

  void note_settled() { --num_unsettled_; }
  int64_t num_ended() const { return num_ended_; }
  int64_t num_unsettled() const { return num_unsettled_; }
  int64_t num_run() const { return num_run_; }
  int64_t num_returns() const { return num_returns_; }
  int64_t num_wakes() const { return num_wakes_; }

 private:
  void count_end() {  // under the mutex
    ++num_ended_;
    // Nobody wakes to find that too few have ended.
    if (!awaited_.empty() && num_ended_ >= *awaited_.begin()) ended_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_, ended_;
  std::deque<std::shared_ptr<ReadyRun>> queue_;
  bool is_open_ = false;
  std::multiset<int64_t> awaited_;  // values of `num_ended` that threads wait for
  std::atomic<int64_t> num_ended_{0}, num_unsettled_{0};
  // For tests: how many runs there were, how often the executor thread took the interpreter lock after them, and how
  // often a thread that waited for runs to end did.
  std::atomic<int64_t> num_run_{0}, num_returns_{0}, num_wakes_{0};
};

}  // namespace lazystep
