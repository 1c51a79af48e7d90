// The kernels of collectives: they launch on the executor thread and wait there, without the interpreter lock.
//
// The reference executable and libraries call the same kernels. Python makes the groups, names what has failed and
// draws the timeline: execute/communicate.py. It also tapes the collectives of a check, as an observer; only then a
// launch or a wait takes the interpreter lock.
//
// The executor thread alone launches and waits. Other threads make groups.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <charconv>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lazystep {

// The connections of a group of ranks, by name as long as Python has it.
class Group {
 public:
  static std::shared_ptr<Group> make(const std::string& name, c10d::Backend& backend, double timeout) {
    auto group = std::make_shared<Group>();
    // The reference, and not Python's pointer: torch's type for the latter is not part of its headers.
    group->backend = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&backend);
    group->timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000));
    std::lock_guard<std::mutex> lock(mutex());
    known()[name] = group;
    return group;
  }

  static std::shared_ptr<Group> find(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex());
    auto found = known().find(name);
    std::shared_ptr<Group> group = found == known().end() ? nullptr : found->second.lock();
    TORCH_CHECK(group != nullptr, "the process group ", name, " has been destroyed");
    return group;
  }

  int64_t agreed() const { return agreed_; }
  void set_agreed(int64_t number) { agreed_ = number; }

  c10::intrusive_ptr<c10d::Backend> backend;
  std::chrono::milliseconds timeout{0};

 private:
  // Never destroyed: the executor thread may be here while the process ends.
  static std::mutex& mutex() {
    static auto* found = new std::mutex;
    return *found;
  }
  static std::map<std::string, std::weak_ptr<Group>>& known() {
    static auto* found = new std::map<std::string, std::weak_ptr<Group>>;
    return *found;
  }

  // The number of the collectives that its ranks have agreed on last, see tiers/agreement.py; negative for none.
  std::atomic<int64_t> agreed_{-1};
};

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One launched collective: what it is, and when it was launched, waited for and there, in seconds.
struct Launch {
  int64_t number = 0;  // in its step
  std::string kind;
  int64_t size = 0;
  at::ScalarType dtype = at::ScalarType::Float;
  std::string group;
  double started = 0, waiting = 0, ended = 0;
};

// What the collectives of one run were.
struct Communicated {
  int64_t num_launched = 0;
  int64_t num_pending = 0;  // that have not been waited for
  std::vector<Launch> ended;
  std::optional<std::pair<Launch, std::string>> failed;  // and why
};

// The collectives of the running step, by the memory that the network writes.
class InFlight {
 public:
  static InFlight& get() {
    static InFlight* found = new InFlight;  // never destroyed, as above
    return *found;
  }

  using Start = c10::intrusive_ptr<c10d::Work> (*)(
      c10d::Backend&, const at::Tensor& target, const at::Tensor& operand, std::string_view detail);

  // Start a collective that sends `operand` and writes `target`. Does not wait.
  void launch(
      const char* kind, Start start, const at::Tensor& target, const at::Tensor& operand, std::string_view detail,
      std::string group) {
    if (is_observed_) {
      pybind11::gil_scoped_acquire lock;
      observer_.attr("launch")(target, operand);
    }
    if (is_silent_) return;
    Launch launched{communicated_.num_launched, kind, target.numel(), target.scalar_type(), std::move(group)};
    launched.started = now();
    try {
      auto found = Group::find(launched.group);
      auto work = start(*found->backend, target, operand, detail);
      ++communicated_.num_launched;
      pending_.insert_or_assign(memory_of(target), Pending{std::move(launched), std::move(work), found->timeout});
    } catch (const std::exception& error) {
      fail(std::move(launched), error);
      throw;
    }
  }

  // Block until the collective that writes `target` has ended, at most for the group's time-out.
  void wait(const at::Tensor& target) {
    if (!is_silent_) {
      auto found = pending_.find(memory_of(target));
      TORCH_INTERNAL_ASSERT(found != pending_.end());
      Pending pending = std::move(found->second);
      pending_.erase(found);
      pending.launch.waiting = now();
      try {
        pending.work->wait(pending.timeout);
      } catch (const std::exception& error) {
        fail(std::move(pending.launch), error);
        throw;
      }
      pending.launch.ended = now();
      communicated_.ended.push_back(std::move(pending.launch));
    }
    if (is_observed_) {
      pybind11::gil_scoped_acquire lock;
      observer_.attr("wait")(target);
    }
  }

  // Tell `observer` of each launch and wait, or nobody. If `is_silent`, nothing is sent. Needs the interpreter lock.
  void observe(pybind11::object observer, bool is_silent) {
    is_observed_ = !observer.is_none();
    is_silent_ = is_silent;
    observer_ = std::move(observer);
  }

  bool is_observed() const { return is_observed_; }
  int64_t num_pending() const { return static_cast<int64_t>(pending_.size()); }
  bool has_failed() const { return communicated_.failed.has_value(); }

  // The step has ended: what its collectives were. Those under way, because it has failed, hold their own memory.
  Communicated take() {
    communicated_.num_pending = num_pending();
    pending_.clear();
    return std::exchange(communicated_, {});
  }

 private:
  struct Pending {
    Launch launch;
    c10::intrusive_ptr<c10d::Work> work;
    std::chrono::milliseconds timeout;
  };

  static const void* memory_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

  void fail(Launch launch, const std::exception& error) {
    const auto* torchs = dynamic_cast<const c10::Error*>(&error);
    communicated_.failed = {std::move(launch), torchs ? torchs->what_without_backtrace() : error.what()};
  }

  std::unordered_map<const void*, Pending> pending_;
  Communicated communicated_;
  std::atomic<bool> is_observed_{false}, is_silent_{false};
  pybind11::object observer_ = pybind11::none();
};

// -- kinds -------------------------------------------------------------------------------------------------

inline c10d::ReduceOp reduce_op(std::string_view name) {
  static const std::map<std::string_view, c10d::ReduceOp::RedOpType> known{
      {"sum", c10d::ReduceOp::SUM}, {"avg", c10d::ReduceOp::AVG},   {"product", c10d::ReduceOp::PRODUCT},
      {"min", c10d::ReduceOp::MIN}, {"max", c10d::ReduceOp::MAX},   {"band", c10d::ReduceOp::BAND},
      {"bor", c10d::ReduceOp::BOR}, {"bxor", c10d::ReduceOp::BXOR},
  };
  return known.at(name);
}

inline c10::intrusive_ptr<c10d::Work> start_all_reduce(
    c10d::Backend& backend, const at::Tensor& target, const at::Tensor&, std::string_view detail) {
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op(detail);
  std::vector<at::Tensor> tensors{target};
  return backend.allreduce(tensors, options);
}

inline c10::intrusive_ptr<c10d::Work> start_broadcast(
    c10d::Backend& backend, const at::Tensor& target, const at::Tensor&, std::string_view detail) {
  c10d::BroadcastOptions options;
  std::from_chars(detail.data(), detail.data() + detail.size(), options.rootRank);
  options.rootTensor = 0;
  std::vector<at::Tensor> tensors{target};
  return backend.broadcast(tensors, options);
}

// As rows: gloo compares shapes, and only sizes matter.
inline c10::intrusive_ptr<c10d::Work> start_all_gather(
    c10d::Backend& backend, const at::Tensor& target, const at::Tensor& operand, std::string_view) {
  at::Tensor out = target.view(-1), sent = operand.view(-1);
  return backend._allgather_base(out, sent);
}

inline c10::intrusive_ptr<c10d::Work> start_reduce_scatter(
    c10d::Backend& backend, const at::Tensor& target, const at::Tensor& operand, std::string_view detail) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op(detail);
  at::Tensor out = target.view(-1), sent = operand.view(-1);
  return backend._reduce_scatter_base(out, sent, options);
}

// -- kernels -----------------------------------------------------------------------------------------------

inline at::Tensor all_reduce(const at::Tensor& x, std::string op, std::string group) {
  InFlight::get().launch("all_reduce", start_all_reduce, x, x, op, std::move(group));
  return x;
}

inline at::Tensor broadcast(const at::Tensor& x, int64_t root, std::string group) {
  InFlight::get().launch("broadcast", start_broadcast, x, x, std::to_string(root), std::move(group));
  return x;
}

inline at::Tensor all_gather(const at::Tensor& out, const at::Tensor& x, std::string group) {
  InFlight::get().launch("all_gather", start_all_gather, out, x, "", std::move(group));
  return out;
}

inline at::Tensor reduce_scatter(const at::Tensor& out, const at::Tensor& x, std::string op, std::string group) {
  InFlight::get().launch("reduce_scatter", start_reduce_scatter, out, x, op, std::move(group));
  return out;
}

inline at::Tensor wait_for(const at::Tensor& x) {
  InFlight::get().wait(x);
  return x;
}

// Those of libraries. `what`: number, kind, details and group, see `sequence_of` in program/collectives.py.
inline void launch_in_library(
    const at::Tensor&, const at::Tensor& out, const std::optional<at::Tensor>& operand, std::string what) {
  std::string_view rest = what;
  auto word = [&rest] {
    auto found = rest.substr(0, rest.find(' '));
    rest.remove_prefix(found.size() + 1);
    return found;
  };
  word();
  std::string_view kind = word(), detail = word();
  std::string group(rest);
  InFlight& to = InFlight::get();
  if (kind == "all_reduce_") return to.launch("all_reduce", start_all_reduce, out, out, detail, group);
  if (kind == "broadcast_") return to.launch("broadcast", start_broadcast, out, out, detail, group);
  TORCH_INTERNAL_ASSERT(operand.has_value());
  if (kind == "all_gather_") return to.launch("all_gather", start_all_gather, out, *operand, detail, group);
  to.launch("reduce_scatter", start_reduce_scatter, out, *operand, detail, group);
}

inline void wait_in_library(
    const at::Tensor&, const at::Tensor& out, const std::optional<at::Tensor>&, std::string) {
  InFlight::get().wait(out);
}

}  // namespace lazystep

TORCH_LIBRARY_IMPL(lazystep, CPU, library) {
  library.impl("all_reduce_", &lazystep::all_reduce);
  library.impl("broadcast_", &lazystep::broadcast);
  library.impl("all_gather_", &lazystep::all_gather);
  library.impl("reduce_scatter_", &lazystep::reduce_scatter);
  library.impl("wait_", &lazystep::wait_for);
  library.impl("launch", &lazystep::launch_in_library);
  library.impl("wait", &lazystep::wait_in_library);
}
