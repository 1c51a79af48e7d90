#include "recorder.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace lazystep {

namespace {

size_t hash_words(const std::vector<Word>& words) {
  Word hash = words.size();
  for (Word word : words) hash = (hash ^ word) * 0x9E3779B97F4A7C15ull + (hash >> 29);
  return hash;
}

// The mark of the observed call: the address of the name is its identity.
constexpr std::string_view kObservedCallName = "lazystep's observed call";
const c10::DebugInfoKind kObservedCall(&kObservedCallName);

Word tagged(const Type* type) { return reinterpret_cast<Word>(type) | 1; }

// Write down what was only a position in the guess. Returns the guess, to be dropped without the lock.
Ptr<KnownRecording> leave_guess(Recording& recording) {
  Ptr<KnownRecording> guess = std::move(recording.guess);
  const Entries& entries = guess->entries;
  auto count = static_cast<ptrdiff_t>(recording.num_entries);
  size_t num_words = recording.num_entries < entries.size() ? entries.starts[count] : entries.words.size();
  recording.entries.words.assign(
      entries.words.begin(), entries.words.begin() + static_cast<ptrdiff_t>(num_words));
  recording.entries.starts.assign(entries.starts.begin(), entries.starts.begin() + count);
  recording.entries.kept.assign(entries.kept.begin(), entries.kept.begin() + count);
  recording.sources.assign(guess->sources.begin(), guess->sources.begin() + count);
  return guess;
}

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void ObservedCall::begin() {
  c10::ThreadLocalDebugInfo::_push(kObservedCall, std::make_shared<c10::DebugInfoBase>());
  is_on_ = true;
}

void ObservedCall::end() {
  is_on_ = false;
  c10::ThreadLocalDebugInfo::_pop(kObservedCall);
}

bool ObservedCall::is_here() const { return is_on_ && c10::ThreadLocalDebugInfo::get(kObservedCall) != nullptr; }

bool ObservedCall::notice_op() {
  if (!is_on_) return false;
  bool is_ours = is_here();
  if (!is_ours) ++num_foreign_;
  return is_ours;
}

Recorder& recorder() {
  static auto* instance = new Recorder;
  return *instance;
}

Afterwards Recorder::record(
    const Ptr<Decision>& decision, c10::ArrayRef<Handle*> operands, c10::ArrayRef<Number> numbers,
    c10::ArrayRef<Ptr<Type>> types, bool is_absolute, c10::SmallVectorImpl<Ptr<Handle>>& made) {
  Ptr<KnownRecording> dropped;  // outlives the lock
  std::unique_lock lock(mutex);
  observed.notice_op();  // under the lock, so that no op between a cut and the next is missed
  Recording& recording = current_;
  for (Handle* operand : operands) {
    if (operand->recording != recording.id && operand->memory->has_error) throw OperandError{operand->memory};
  }
  if (recording.num_entries == 0) recording.started = now();
  size_t first = recording.num_entries;
  c10::SmallVector<Word, 12> words{reinterpret_cast<Word>(decision.get())};
  for (Handle* operand : operands) {
    words.push_back(operand->recording == recording.id ? operand->index : adopt(*operand));
  }
  if (is_absolute) {
    for (Handle* operand : operands) {
      if (operand->memory->least_offset > 0) adopt_anchor(*operand);
    }
  }
  append(words, decision);
  recording.numbers.insert(recording.numbers.end(), numbers.begin(), numbers.end());
  for (int64_t operand : decision->writes) {
    Memory& memory = *operands[operand]->memory;
    if (memory.writer != recording.id) {
      memory.writer = recording.id;
      recording.written.emplace_back(memory.number, operands[operand]->memory);
    }
  }
  c10::SmallVector<Ptr<Memory>, 4> fresh;
  size_t num_new = decision->made.size() - decision->rebinds.size();
  for (size_t i = 0; i < decision->made.size(); ++i) {
    const auto& [base_type, number, nbytes] = decision->made[i];
    const Ptr<Type>& type = types[i];
    Ptr<Memory> memory;
    if (number >= 0) {
      memory = operands[number]->memory;
      // What `resize_` does. A view says nothing of the size: its decision may be from a larger memory.
      if (i >= num_new && static_cast<size_t>(nbytes) > memory->nbytes()) memory->set_nbytes(nbytes);
    } else {
      if (fresh.size() < static_cast<size_t>(-number)) {
        fresh.push_back(c10::make_intrusive<Memory>(nbytes));
        fresh.back()->recording = fresh.back()->writer = recording.id;
        fresh.back()->number = recording.num_storages++;
        fresh.back()->least_offset = 0;
      }
      memory = fresh[-1 - number];
    }
    auto handle = c10::make_intrusive<Handle>(type, std::move(memory));
    handle->recording = recording.id;
    handle->index = recording.num_values++;
    handle->is_made = true;
    recording.made.emplace_back(handle);
    made.push_back(std::move(handle));
  }
  dropped = std::move(left_);
  Afterwards afterwards;
  afterwards.recording = recording.id;
  afterwards.last = recording.num_entries;
  // Entries that follow the guess have the guess's lines.
  afterwards.first = recording.guess ? afterwards.last : first;
  afterwards.is_full = recording.num_entries >= max_entries;
  return afterwards;
}

int64_t Recorder::adopt(Handle& handle) {
  Recording& recording = current_;
  Memory& memory = *handle.memory;
  int64_t offset = handle.type->byte_offset();
  auto itemsize = static_cast<int64_t>(c10::elementSize(handle.type->dtype));
  if (memory.recording != recording.id) {
    memory.recording = recording.id;
    memory.number = recording.num_storages++;
    memory.first_offset = memory.least_offset = offset;
    memory.itemsize = itemsize;
  }
  Word words[] = {
      tagged(handle.type->at_zero()), static_cast<Word>(memory.number), memory.nbytes(),
      static_cast<Word>(offset - memory.first_offset)};
  append(words, handle.type->based ? handle.type->based : handle.type);
  memory.least_offset = std::min(memory.least_offset, offset);
  recording.inputs.push_back(Ptr<Handle>::reclaim_copy(&handle));
  handle.pristine = false;
  handle.recording = recording.id;
  handle.is_made = false;
  handle.index = recording.num_values++;
  if (memory.itemsize != itemsize && memory.least_offset > 0) adopt_anchor(handle);
  return handle.index;
}

void Recorder::adopt_anchor(Handle& handle) {
  // Of an input, whose tensor is there when the step runs.
  auto& inputs = current_.inputs;
  auto input = std::find_if(inputs.begin(), inputs.end(), [&](const auto& one) { return one->memory == handle.memory; });
  const Ptr<Handle>& base = *input;
  auto anchor = c10::make_intrusive<Handle>(base->type->based ? base->type->based : base->type, base->memory);
  anchor->base = base->base ? base->base : base;
  adopt(*anchor);
}

void Recorder::append(c10::ArrayRef<Word> words, const Ptr<c10::intrusive_ptr_target>& keep) {
  Recording& recording = current_;
  if (recording.guess) {
    const Entries& expected = recording.guess->entries;
    size_t entry = recording.num_entries;
    if (entry < expected.size()) {
      size_t start = expected.starts[entry], end = expected.end_of(entry);
      if (end - start == words.size() &&
          std::equal(words.begin(), words.end(), expected.words.begin() + static_cast<ptrdiff_t>(start))) {
        ++recording.num_entries;
        return;
      }
    }
    left_ = leave_guess(recording);
  }
  recording.entries.starts.push_back(recording.entries.words.size());
  recording.entries.words.insert(recording.entries.words.end(), words.begin(), words.end());
  recording.entries.kept.push_back(keep);
  recording.sources.emplace_back();
  ++recording.num_entries;
}

void Recorder::set_source(const Afterwards& where, const Ptr<PyBox>& source) {
  std::lock_guard lock(mutex);
  // Another thread may have cut the recording meanwhile: those entries keep no line.
  if (current_.id != where.recording || current_.guess) return;
  for (size_t entry = where.first; entry < where.last; ++entry) {
    if (!current_.sources[entry]) current_.sources[entry] = source;
  }
}

size_t Recorder::num_entries() {
  std::lock_guard lock(mutex);
  return current_.num_entries;
}

bool Recorder::is_pending(const Handle& handle) {
  std::lock_guard lock(mutex);
  return (handle.recording == current_.id && handle.is_made) || handle.memory->writer == current_.id;
}

int64_t Recorder::index_in_current(const Handle& handle) {
  std::lock_guard lock(mutex);
  return handle.recording == current_.id && handle.is_made ? handle.index : -1;
}

bool Recorder::cut(Finished& finished) {
  std::lock_guard lock(mutex);
  if (current_.num_entries == 0) return false;
  finished.recording = std::move(current_);
  current_ = Recording{};
  current_.id = next_id_++;
  // A value that is dying on another thread is not revived: its last tensor is gone.
  for (auto& weak : finished.recording.made) {
    if (auto handle = weak.lock()) {
      int64_t index = handle->index;
      finished.live.emplace_back(index, std::move(handle));
    }
  }
  return true;
}

Ptr<KnownRecording> Recorder::identify(Recording& recording) {
  if (recording.guess) {
    if (recording.guess->entries.size() == recording.num_entries) return recording.guess;
    leave_guess(recording);
  }
  ++num_lookups;
  size_t hash = hash_words(recording.entries.words);
  auto [found, end] = known_.equal_range(hash);
  while (found != end) {
    Ptr<KnownRecording> known = found->second.lock();
    if (!known) {
      found = known_.erase(found);
      continue;
    }
    if (known->entries.words == recording.entries.words && known->entries.starts == recording.entries.starts) {
      return known;
    }
    ++found;
  }
  auto known = c10::make_intrusive<KnownRecording>();
  known->entries = std::move(recording.entries);
  known->sources = std::move(recording.sources);
  if (known_.size() >= sweep_at_) {
    for (auto it = known_.begin(); it != known_.end();) it = it->second.expired() ? known_.erase(it) : ++it;
    sweep_at_ = std::max<size_t>(1024, 2 * known_.size());
  }
  known_.emplace(hash, c10::weak_intrusive_ptr<KnownRecording>(known));
  return known;
}

Ptr<KnownRecording> Recorder::peek() {
  Recording copy;
  {
    std::lock_guard lock(mutex);
    copy.guess = current_.guess;
    copy.num_entries = current_.num_entries;
    copy.entries = current_.entries;
    copy.sources = current_.sources;
  }
  return identify(copy);
}

std::pair<std::vector<Ptr<Handle>>, std::vector<Number>> Recorder::peek_operands() {
  std::lock_guard lock(mutex);
  return {current_.inputs, current_.numbers};
}

void Recorder::guess_next(const Ptr<KnownRecording>& known) {
  if (last_known_) last_known_->follower = c10::weak_intrusive_ptr<KnownRecording::Target>(Ptr<KnownRecording::Target>(known));
  last_known_ = known;
  Ptr<KnownRecording> follower = Ptr<KnownRecording>::reclaim(static_cast<KnownRecording*>(known->follower.lock().release()));
  std::lock_guard lock(mutex);
  if (follower && current_.num_entries == 0) current_.guess.swap(follower);
}

}  // namespace lazystep
