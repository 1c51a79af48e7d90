#include "call.h"

#include <torch/csrc/utils/pybind.h>

#include <cstring>

namespace lazystep {

namespace {

// First words of what is not a lazy tensor: odd, as no address is.
enum Tag : Word {
  kNone = 1, kTrue = 3, kFalse = 5, kInt = 7, kFloat = 9, kComplex = 11, kList = 13, kString = 15,
  kDevice = 17, kLiteralInt = 19, kLiteralFloat = 21, kLiteralComplex = 23, kInts = 25, kGroups = 27,
  kBools = 29, kDefault = 31, kDefaultType = 33,
};

// A run of more shapes than this is better off forgetting all of them.
constexpr size_t kMaxLines = 100'000;

Word bits(double number) {
  Word word = 0;
  std::memcpy(&word, &number, sizeof word);
  return word;
}

}  // namespace

bool is_default(const c10::Argument& argument, const c10::IValue& value) {
  const auto& found = argument.default_value();
  if (!found.has_value()) return false;
  // The common kinds first: comparing two IValues in general is slow.
  if (found->isNone() || value.isNone()) return found->isNone() && value.isNone();
  if (found->isInt() && value.isInt()) return found->toInt() == value.toInt();
  if (found->isBool() && value.isBool()) return found->toBool() == value.toBool();
  if (found->isDouble() && value.isDouble()) return found->toDouble() == value.toDouble();
  return *found == value;
}

size_t num_given(const OpTraits& traits, c10::ArrayRef<c10::IValue> arguments) {
  size_t count = traits.num_positional;
  while (count > 0 && is_default(traits.schema->arguments()[count - 1], arguments[count - 1])) --count;
  return count;
}

bool Call::read(const OpTraits& traits, c10::ArrayRef<c10::IValue> arguments) {
  size_t given = num_given(traits, arguments);
  is_absolute_ = traits.is_absolute;
  for (size_t i = 0; i < arguments.size(); ++i) {
    bool is_positional = i < traits.num_positional;
    if (is_positional ? i >= given : is_default(traits.schema->arguments()[i], arguments[i])) {
      key.push_back(kDefault);
    } else if (!add(arguments[i], traits.takes_number[i], traits.float_literals)) return false;
  }
  if (traits.is_writing && operands.size() > 1) add_shared_memory();
  // An op that makes floats of integers or of nothing asks for torch's default data type.
  if (auto default_type = at::typeMetaToScalarType(at::get_default_dtype()); default_type != at::kFloat) {
    key.append({kDefaultType, static_cast<Word>(default_type)});
  }
  if (traits.needs_nbytes) {
    for (LazyImpl* operand : operands) key.push_back(operand->handle()->memory->nbytes());
  }
  return true;
}

bool Call::add(const c10::IValue& argument, bool is_number, bool float_literals) {
  if (argument.isTensor()) return add_tensor(argument.toTensor(), is_number, float_literals);
  if (argument.isNone()) {
    key.push_back(kNone);
  } else if (argument.isInt()) {
    if (is_number && !float_literals) {
      key.push_back(kInt);
      numbers.emplace_back(argument.toInt());
    } else {
      key.append({kLiteralInt, static_cast<Word>(argument.toInt())});
    }
  } else if (argument.isBool()) {
    key.push_back(argument.toBool() ? kTrue : kFalse);
  } else if (argument.isDouble()) {
    add_number(argument.toDouble(), float_literals);
  } else if (argument.isIntList()) {
    const auto list = argument.toIntVector();
    if (is_number && !float_literals) {
      key.append({kList, list.size()});
      for (int64_t number : list) {
        key.push_back(kInt);
        numbers.emplace_back(number);
      }
    } else {
      key.append({kInts, list.size()});
      key.append(list.begin(), list.end());
    }
  } else if (argument.isTensorList()) {
    const auto list = argument.toTensorVector();
    key.append({kList, list.size()});
    for (const at::Tensor& tensor : list) {
      if (!add_tensor(tensor, is_number, float_literals)) return false;
    }
  } else if (argument.isDoubleList()) {
    const auto list = argument.toDoubleVector();
    key.append({kList, list.size()});
    for (double number : list) add_number(number, float_literals);
  } else if (argument.isBoolList()) {
    const auto list = argument.toBoolList();
    key.append({kBools, list.size()});
    for (bool flag : list) key.push_back(flag);
  } else if (argument.isList()) {
    const auto list = argument.toListRef();
    key.append({kList, list.size()});
    for (const c10::IValue& element : list) {
      if (!add(element, is_number, float_literals)) return false;
    }
  } else if (argument.isDevice()) {
    // A tensor of another device, made from the type of a lazy one, is not for the recorder.
    if (argument.toDevice().type() != c10::DeviceType::Lazy) return false;
    key.push_back(kDevice);
  } else if (argument.isString()) {
    const std::string& text = argument.toStringRef();
    key.append({kString, text.size()});
    for (size_t at = 0; at < text.size(); at += sizeof(Word)) {
      Word word = 0;
      std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
      key.push_back(word);
    }
  } else if (argument.isComplexDouble()) {
    auto number = argument.toComplexDouble();
    if (float_literals) {
      key.append({kLiteralComplex, bits(number.real()), bits(number.imag())});
    } else {
      key.push_back(kComplex);
      numbers.emplace_back(number);
    }
  } else if (argument.isGenerator()) {
    key.push_back(kNone);  // random ops are decided by their name
  } else {
    return false;
  }
  return true;
}

void Call::add_number(double number, bool is_literal) {
  if (is_literal) {
    key.append({kLiteralFloat, bits(number)});
  } else {
    key.push_back(kFloat);
    numbers.emplace_back(number);
  }
}

bool Call::add_tensor(const at::Tensor& tensor, bool is_number, bool float_literals) {
  if (!tensor.defined()) {
    key.push_back(kNone);
    return true;
  }
  if (LazyImpl* lazy = as_lazy(tensor.unsafeGetTensorImpl())) {
    const Type* type = lazy->handle()->type.get();
    key.push_back(reinterpret_cast<Word>(is_absolute_ ? type : type->at_zero()));
    operands.push_back(lazy);
    return true;
  }
  // A Python number becomes a CPU tensor on its way here. Normalized: it is a number again.
  if (!tensor.unsafeGetTensorImpl()->is_wrapped_number() || tensor.key_set().has(c10::DispatchKey::Python)) {
    return false;
  }
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return add(*tensor.const_data_ptr<double>(), is_number, float_literals);
    case at::kLong:
      return add(*tensor.const_data_ptr<int64_t>(), is_number, float_literals);
    case at::kBool:
      return add(*tensor.const_data_ptr<bool>(), is_number, float_literals);
    case at::kComplexDouble:
      return add(*tensor.const_data_ptr<c10::complex<double>>(), is_number, float_literals);
    default:
      return false;
  }
}

void Call::add_shared_memory() {
  // A number per operand, equal where they share memory; nothing where none does.
  c10::SmallVector<Word, 16> groups;
  bool is_shared = false;
  std::unordered_map<Memory*, Word> first;
  const bool is_small = operands.size() <= 8;
  for (size_t i = 0; i < operands.size(); ++i) {
    Memory* memory = operands[i]->handle()->memory.get();
    Word group = i;
    if (is_small) {
      for (size_t j = 0; j < i; ++j) {
        if (operands[j]->handle()->memory.get() == memory) {
          group = j;
          break;
        }
      }
    } else {
      group = first.emplace(memory, i).first->second;
    }
    is_shared |= group != i;
    groups.push_back(group);
  }
  if (!is_shared) return;
  key.push_back(kGroups);
  key.append(groups.begin(), groups.end());
  if (is_absolute_) return;
  // What overlaps depends on where they are, as seen from each other.
  for (size_t i = 0; i < operands.size(); ++i) {
    const Type& type = *operands[i]->handle()->type;
    int64_t least = type.offset;
    for (size_t j = 0; j < operands.size(); ++j) {
      if (groups[j] != groups[i]) continue;
      const Type& other = *operands[j]->handle()->type;
      bool is_alike = c10::elementSize(other.dtype) == c10::elementSize(type.dtype);
      least = std::min(least, is_alike ? other.offset : 0);
    }
    key.push_back(static_cast<Word>(type.offset - least));
  }
}

size_t Call::hash() const {
  Word hash = key.size();
  for (Word word : key) hash = (hash ^ word) * 0x9E3779B97F4A7C15ull + (hash >> 29);
  return hash;
}

std::shared_ptr<const Line> Cache::find_locked(c10::ArrayRef<Word> key, size_t hash) const {
  auto [found, end] = lines_.equal_range(hash);
  for (; found != end; ++found) {
    if (key.equals(found->second->key)) return found->second;
  }
  return nullptr;
}

std::shared_ptr<const Line> Cache::find(const Call& call, size_t hash) {
  std::lock_guard lock(mutex_);
  return find_locked(call.key, hash);
}

std::shared_ptr<const Line> Cache::add(const Call& call, size_t hash, PyObject* decision) {
  auto line = std::make_shared<Line>();
  line->key.assign(call.key.begin(), call.key.end());
  for (LazyImpl* operand : call.operands) {
    line->types.push_back(operand->handle()->type);  // keeps the same type at offset zero, too
  }
  line->python = PyRef::borrow(decision);
  auto action = py::handle(decision).attr("action").attr("value").cast<std::string>();
  if (action == "record") {
    line->action = Line::kRecord;
    line->decision = decision_from_python(decision);
  } else if (action == "draw") {
    line->action = Line::kDraw;
  }
  decltype(lines_) dropped;  // outlives the lock
  std::lock_guard lock(mutex_);
  // Another thread may have decided the same call meanwhile: programs are compared by their decisions.
  if (auto found = find_locked(line->key, hash)) return found;
  if (lines_.size() >= kMaxLines) dropped.swap(lines_);
  lines_.emplace(hash, line);
  return line;
}

void Cache::clear() {
  decltype(lines_) dropped;  // outlives the lock
  std::lock_guard lock(mutex_);
  dropped.swap(lines_);
}

}  // namespace lazystep
