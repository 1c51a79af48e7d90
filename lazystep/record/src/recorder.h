// The current recording, and the recordings that are known.
//
// A recording is a sequence of entries in words: an op is its decision and the indices of its
// operands, an input is its type, the number of its storage, that storage's size and its place there.
// Entries hold nothing that varies, so the words *are* the program's key.
//
// [Note: offsets] Where an input begins in its memory is no part of a program: a step may take another slice of
// a dataset each time. The type in the entry is the one at offset zero, and the place counts from the first input in
// the same memory. In the program the input with the least offset begins its storage. A run gets tensors
// that begin there (`Handles::tensors`). Ops are decided for operands at offset zero; a view gets the offset of
// its operand on top. Two things need true offsets: ops that take an offset as an argument or resize
// (`OpTraits::is_absolute`), and views of one memory whose elements differ in size. For these the recording takes the
// start of the memory as another input, an *anchor*, so that the storage begins there.
//
// [Note: following] The recorder guesses the recording that comes next from the one that came last
// time and compares each entry with the guess as it arrives. As long as they agree nothing is
// appended at all: a position in the guess is the whole key, and at the barrier it is known.
//
// [Note: locks] `mutex` is held for an entry or a cut. Under it nothing waits, no Python runs and no
// reference is dropped, since dropping one may take the GIL. A thread that holds the GIL may take `mutex`.
#pragma once

#include <chrono>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "decision.h"

namespace lazystep {

using Word = uint64_t;

// The user's line of each entry: a Python `Source`; null where it is not known, or not known yet.
using Sources = std::vector<Ptr<PyBox>>;

// The words of a recording and what keeps their addresses valid.
struct Entries {
  std::vector<Word> words;
  std::vector<size_t> starts;  // of each entry in `words`
  std::vector<Ptr<c10::intrusive_ptr_target>> kept;

  size_t size() const { return starts.size(); }
  size_t end_of(size_t entry) const { return entry + 1 < starts.size() ? starts[entry + 1] : words.size(); }
};

// An earlier recording: the key of its program.
struct KnownRecording : c10::intrusive_ptr_target {
  Entries entries;
  Sources sources;
  // What was recorded after this one the last time. Weak: guesses are replaced as the loop changes.
  // (Of its base: a struct can't hold a weak pointer to itself, being incomplete.)
  using Target = c10::intrusive_ptr_target;
  c10::weak_intrusive_ptr<Target> follower = c10::weak_intrusive_ptr<Target>::reclaim(nullptr);

  // The table of known recordings holds a weak reference for a while: nothing but this struct stays.
  void release_resources() override {
    entries = {};
    sources = {};
  }
};

struct Recording {
  RecordingId id = 0;
  Ptr<KnownRecording> guess;  // null once the recording has left it
  size_t num_entries = 0;
  Entries entries;  // empty as long as the guess is followed
  Sources sources;
  std::vector<Number> numbers;
  std::vector<Ptr<Handle>> inputs;
  std::vector<c10::weak_intrusive_ptr<Handle>> made;
  // With the number that each has here: the next recording numbers it anew.
  std::vector<std::pair<int64_t, Ptr<Memory>>> written;
  int64_t num_values = 0;
  int64_t num_storages = 0;
  double started = 0;
};

// A recording that has ended, with the handles that were alive at the barrier.
struct Finished {
  Recording recording;
  // Each with its number there, since another thread's next recording may number it anew at once.
  std::vector<std::pair<int64_t, Ptr<Handle>>> live;
};

// What `Recorder::record` asks of its caller, once the lock is free.
struct Afterwards {
  RecordingId recording = 0;
  size_t first = 0, last = 0;  // entries whose source line is to be told by `set_source`
  bool is_full = false;
};

// A half-updated operand: its error has to be raised.
struct OperandError {
  Ptr<Memory> memory;
};

// [Note: observed calls] A captured step observes the ops of one call. Other threads may record meanwhile, and
// the call's own backward runs on a thread of autograd's. So the call carries a mark, which torch takes along to
// the threads on which it works for the call. Ops with the mark leave draws and allocations to Python, whose
// handlers tell the observer. Ops without it are foreign and are counted: they may be in the same recording.
class ObservedCall {
 public:
  void begin();  // on the thread of the call
  void end();    // on the same thread
  bool is_here() const;  // whether the calling thread works for the call
  // An op has come. Returns `is_here()`, and counts the op if it is foreign.
  bool notice_op();
  uint64_t num_foreign() const { return num_foreign_; }

 private:
  std::atomic<bool> is_on_{false};
  std::atomic<uint64_t> num_foreign_{0};
};

class Recorder {
 public:
  // Append an op. `types`: of its new values. Fills `made` with these. Throws `OperandError`.
  Afterwards record(
      const Ptr<Decision>& decision, c10::ArrayRef<Handle*> operands, c10::ArrayRef<Number> numbers,
      c10::ArrayRef<Ptr<Type>> types, bool is_absolute, c10::SmallVectorImpl<Ptr<Handle>>& made);
  void set_source(const Afterwards& where, const Ptr<PyBox>& source);

  size_t num_entries();
  // Whether the current recording has to run before this value can be read.
  bool is_pending(const Handle& handle);
  int64_t index_in_current(const Handle& handle);  // -1 if the current recording does not make it
  // End the current recording and start the next. False if nothing was recorded.
  bool cut(Finished& finished);
  // The known recording with exactly these entries, a new one if there is none. Needs the GIL.
  Ptr<KnownRecording> identify(Recording& recording);
  Ptr<KnownRecording> peek();  // of the current recording; needs the GIL
  std::pair<std::vector<Ptr<Handle>>, std::vector<Number>> peek_operands();  // its inputs and numbers
  // Tell which recording has ended, so that the next can be guessed. Needs the GIL.
  void guess_next(const Ptr<KnownRecording>& known);

  ObservedCall observed;
  std::mutex mutex;
  std::atomic<size_t> max_entries{20000};
  std::atomic<uint64_t> num_lookups{0};  // recordings that were identified by their words

 private:
  void append(c10::ArrayRef<Word> words, const Ptr<c10::intrusive_ptr_target>& keep);
  int64_t adopt(Handle& handle);
  void adopt_anchor(Handle& handle);

  Recording current_{1, {}};
  RecordingId next_id_ = 2;
  // What the recording has just left; dropped when the lock is free.
  Ptr<KnownRecording> left_;
  // By hash of the words, weak: the program cache decides how long a recording is known.
  std::unordered_multimap<size_t, c10::weak_intrusive_ptr<KnownRecording>> known_;
  size_t sweep_at_ = 1024;  // how many, before those that are no longer known are removed
  Ptr<KnownRecording> last_known_;
};

// The process's recorder. Never destroyed: tensors outlive everything.
Recorder& recorder();

}  // namespace lazystep
