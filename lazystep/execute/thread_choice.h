// Chooses on how many threads a library runs: one or all, whichever is faster at present.
//
// A small step can lose more time at barriers between threads than the threads save. So can a large step while
// another process, or a thread of this one, computes: a thread spins at a barrier while the thread that it waits for
// has no processor. Such neighbours come and go, so the counts are measured again when runs have become slow. As long
// as even the fastest count is slow, they are measured again at growing intervals, until the neighbour is gone.
//
// Beside a neighbour, the times on all threads scatter: a few runs find both processors free, and most take a hundred
// times as long. So counts are compared by medians, since one lucky run says nothing, and some slow runs among the last
// few count as much as some in a row.
//
// In C++ because runs without the interpreter lock are measured, too. It belongs to the thread that runs steps.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace lazystep {

class ThreadChoice {
 public:
  // `like`: the choice for a similar library, which is kept until runs become slow; may be null.
  ThreadChoice(std::vector<int> counts, const ThreadChoice* like) : counts_(std::move(counts)) {
    std::sort(counts_.begin(), counts_.end());
    counts_.erase(std::unique(counts_.begin(), counts_.end()), counts_.end());
    begin(kFirstTurns);
    if (like != nullptr && std::find(counts_.begin(), counts_.end(), like->chosen_) != counts_.end()) {
      chosen_ = like->chosen_;
    }
  }

  // The number of threads for the next run.
  int next() const { return chosen_ ? chosen_ : counts_[num_measurements_ % counts_.size()]; }

  // The run on `next()` threads has taken this long.
  void took(double seconds) {
    if (counts_.size() == 1) return;
    if (!chosen_) return compare(seconds);
    --num_until_repeat_;
    if (usual_ == kNever) usual_ = seconds;  // taken over from another library
    recent_ = static_cast<uint8_t>(recent_ << 1 | (seconds > kSlow * usual_));
    if (std::popcount(recent_) == kPatience || num_until_repeat_ == 0) begin(kTurns);
  }

 private:
  static constexpr size_t kFirstTurns = 6, kTurns = 3;  // measured runs per count; the first runs are slow on any count
  static constexpr double kSlow = 1.6;  // a run is slow if it takes this many times as long as usual
  static constexpr int kPatience = 4;  // slow runs among the last eight before the counts are measured again
  static constexpr int kFirstRepeat = 64, kLastRepeat = 1024;  // runs until the next measurement, after a slow one
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  void begin(size_t num_turns) {
    times_.assign(counts_.size(), {});
    usual_ = kNever;
    chosen_ = counts_.size() == 1 ? counts_[0] : 0;
    num_measurements_ = 0;
    num_measurements_needed_ = num_turns * counts_.size();
    recent_ = 0;
    num_until_repeat_ = -1;  // never
  }

  static double median(std::vector<double>& times) {
    auto middle = times.begin() + static_cast<std::ptrdiff_t>((times.size() - 1) / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle;
  }

  void compare(double seconds) {
    times_[num_measurements_ % counts_.size()].push_back(seconds);
    if (++num_measurements_ < num_measurements_needed_) return;
    for (size_t i = 0; i < counts_.size(); ++i) {
      double one = median(times_[i]);
      if (i == 0 || one < usual_) {
        usual_ = one;
        chosen_ = counts_[i];
      }
    }
    shortest_ever_ = std::min(shortest_ever_, usual_);
    if (usual_ > kSlow * shortest_ever_) {
      num_until_repeat_ = repeat_after_;
      repeat_after_ = std::min(2 * repeat_after_, kLastRepeat);
    } else {
      repeat_after_ = kFirstRepeat;
    }
  }

  std::vector<int> counts_;
  std::vector<std::vector<double>> times_;  // of the runs that are being compared, for each count
  double usual_ = kNever;  // the median on the chosen count when it was chosen
  double shortest_ever_ = kNever;  // the least of these medians
  int repeat_after_ = kFirstRepeat;
  int chosen_ = 0;  // the count that is used; 0 while counts are being compared
  size_t num_measurements_ = 0, num_measurements_needed_ = 0;
  uint8_t recent_ = 0;  // which of the last eight runs were slow
  int num_until_repeat_ = -1;
};

}  // namespace lazystep
