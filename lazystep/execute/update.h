// The op lazystep::update: elementwise arithmetic over many tensors, such as an optimizer's update, in one call.
//
// Inductor would generate and compile a loop for each parameter. Here the arithmetic is data (the text `code`,
// written by compile/update.py), and the loops below were compiled once, with the package. A *lane* is one
// parameter with its state and its gradient: tensors of one shape, strides and data type. A *kind* is what
// the lanes have in common: a list of operations. Each operation runs over a block of elements that stays in
// the first-level cache, so memory is read and written once per tensor, as in a fused loop.
//
// The text, as numbers with spaces between them:
//   kinds; for each kind: is double, tensors, temporaries, numbers, operations;
//     for each operation: which (see `Operation`), result, three operands, number
//   lanes; for each lane: kind; for each tensor its index; for each number its source and index
// Operands are tensors first, then temporaries. An index counts the written tensors, then the others.
#pragma once

#include <ATen/ATen.h>
#include <ATen/TensorIterator.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "fused.h"

namespace lazystep {

constexpr int64_t kBlock = 1024;       // elements: a handful of such blocks fit into 32 KB
constexpr int64_t kGrain = 32;         // blocks that are worth a thread of their own; torch's own grain
constexpr int kMaxValues = 64;         // tensors and temporaries of a lane
constexpr int kMaxTemporaries = 16;

// The numbers are part of the text: compile/update.py has the same list.
enum Operation : int {
  COPY = 0,
  FILL,         // s
  ADD,          // a + b
  ADD_NUMBER,   // a + s
  ADD_SCALED,   // a + s * b
  SUB,          // a - b
  RSUB_NUMBER,  // s - a
  MUL,
  MUL_NUMBER,
  DIV,
  DIV_NUMBER,
  SQRT,
  NEG,
  ABS,
  RECIPROCAL,
  MAXIMUM,
  MINIMUM,
  CLAMP_MIN,    // max(a, s)
  CLAMP_MAX,
  ADDCMUL,      // a + s * b * c
  ADDCDIV,      // a + s * b / c
  LERP,         // from a to b by s
  SIGN,
  NUM_OPERATIONS,
};

struct Step {
  int operation, result, a, b, c, number;
};

struct Kind {
  bool is_double = false;
  int num_tensors = 0, num_temporaries = 0, num_numbers = 0;
  std::vector<Step> steps;
};

enum Source : int { FLOATS = 0, INTS, TENSOR, LITERAL };

struct NumberSource {
  Source source;
  int64_t index = 0;
  double literal = 0.0;
};

struct Lane {
  int kind;
  std::vector<int64_t> tensors;
  std::vector<NumberSource> numbers;
};

struct Code {
  std::vector<Kind> kinds;
  std::vector<Lane> lanes;
};

class CodeReader {
 public:
  explicit CodeReader(const std::string& text) : next_(text.c_str()) {}

  Code read() {
    Code code;
    code.kinds.resize(integer(1 << 20));
    for (Kind& kind : code.kinds) {
      kind.is_double = integer(2);
      kind.num_tensors = integer(kMaxValues + 1);
      kind.num_temporaries = integer(kMaxTemporaries + 1);
      kind.num_numbers = integer(1 << 20);
      const int num_values = kind.num_tensors + kind.num_temporaries;
      TORCH_CHECK(num_values <= kMaxValues, "lazystep::update: a lane has too many tensors");
      kind.steps.resize(integer(1 << 20));
      for (Step& step : kind.steps) {
        step.operation = integer(NUM_OPERATIONS);
        step.result = integer(num_values);
        step.a = integer(num_values);
        step.b = integer(num_values);
        step.c = integer(num_values);
        step.number = integer(kind.num_numbers ? kind.num_numbers : 1);
      }
    }
    code.lanes.resize(integer(1 << 24));
    for (Lane& lane : code.lanes) {
      lane.kind = integer(static_cast<int64_t>(code.kinds.size()));
      const Kind& kind = code.kinds[lane.kind];
      lane.tensors.resize(kind.num_tensors);
      for (int64_t& index : lane.tensors) index = integer(1 << 24);
      lane.numbers.resize(kind.num_numbers);
      for (NumberSource& number : lane.numbers) {
        number.source = static_cast<Source>(integer(LITERAL + 1));
        if (number.source == LITERAL) {
          number.literal = real();
        } else {
          number.index = integer(1 << 24);
        }
      }
    }
    return code;
  }

 private:
  // A number below `bound`.
  int64_t integer(int64_t bound) {
    char* end = nullptr;
    const int64_t value = std::strtoll(next_, &end, 10);
    TORCH_CHECK(end != next_ && value >= 0 && value < bound, "lazystep::update: the code is damaged");
    next_ = end;
    return value;
  }

  double real() {
    char* end = nullptr;
    const double value = std::strtod(next_, &end);  // also of hexadecimal notation
    TORCH_CHECK(end != next_, "lazystep::update: the code is damaged");
    next_ = end;
    return value;
  }

  const char* next_;
};

inline std::shared_ptr<const Code> code_of(const std::string& text) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<const Code>> known;
  std::lock_guard<std::mutex> guard(mutex);
  auto& found = known[text];
  if (!found) found = std::make_shared<const Code>(CodeReader(text).read());
  return found;
}

// Compiled for each of these instruction sets; the loader chooses. Without contraction to fused
// multiply-adds (see setup.py), the sets give the same bits.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define LAZYSTEP_VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LAZYSTEP_VECTORIZED
#endif

// NaN wins, as in torch.
#define LAZYSTEP_MAX(x, y) ((x) > (y) || (x) != (x) ? (x) : (y))
#define LAZYSTEP_MIN(x, y) ((x) < (y) || (x) != (x) ? (x) : (y))
#define LAZYSTEP_LOOP(expression)       \
  for (int64_t i = 0; i < n; ++i) {     \
    o[i] = (expression);                \
  }                                     \
  break

// A macro and not a template: `target_clones` wants plain functions, and loops that are inlined into them.
// The result may be one of the operands, element by element.
#define LAZYSTEP_DEFINE_RUN_BLOCK(name, real, square_root, absolute)                                     \
  LAZYSTEP_VECTORIZED inline void name(const Step* steps, size_t num_steps, real* const* values,         \
                                       const real* numbers, int64_t n) {                                 \
    for (size_t number = 0; number < num_steps; ++number) {                                              \
      const Step& step = steps[number];                                                                  \
      real* o = values[step.result];                                                                     \
      const real* a = values[step.a];                                                                    \
      const real* b = values[step.b];                                                                    \
      const real* c = values[step.c];                                                                    \
      const real s = numbers[step.number];                                                               \
      switch (step.operation) {                                                                          \
        case COPY: LAZYSTEP_LOOP(a[i]);                                                                  \
        case FILL: LAZYSTEP_LOOP(s);                                                                     \
        case ADD: LAZYSTEP_LOOP(a[i] + b[i]);                                                            \
        case ADD_NUMBER: LAZYSTEP_LOOP(a[i] + s);                                                        \
        case ADD_SCALED: LAZYSTEP_LOOP(a[i] + s * b[i]);                                                 \
        case SUB: LAZYSTEP_LOOP(a[i] - b[i]);                                                            \
        case RSUB_NUMBER: LAZYSTEP_LOOP(s - a[i]);                                                       \
        case MUL: LAZYSTEP_LOOP(a[i] * b[i]);                                                            \
        case MUL_NUMBER: LAZYSTEP_LOOP(a[i] * s);                                                        \
        case DIV: LAZYSTEP_LOOP(a[i] / b[i]);                                                            \
        case DIV_NUMBER: LAZYSTEP_LOOP(a[i] / s);                                                        \
        case SQRT: LAZYSTEP_LOOP(square_root(a[i]));                                                     \
        case NEG: LAZYSTEP_LOOP(-a[i]);                                                                  \
        case ABS: LAZYSTEP_LOOP(absolute(a[i]));                                                         \
        case RECIPROCAL: LAZYSTEP_LOOP(1 / a[i]);                                                        \
        case MAXIMUM: LAZYSTEP_LOOP(LAZYSTEP_MAX(a[i], b[i]));                                           \
        case MINIMUM: LAZYSTEP_LOOP(LAZYSTEP_MIN(a[i], b[i]));                                           \
        case CLAMP_MIN: LAZYSTEP_LOOP(LAZYSTEP_MAX(a[i], s));                                            \
        case CLAMP_MAX: LAZYSTEP_LOOP(LAZYSTEP_MIN(a[i], s));                                            \
        case ADDCMUL: LAZYSTEP_LOOP(a[i] + s * b[i] * c[i]);                                             \
        case ADDCDIV: LAZYSTEP_LOOP(a[i] + s * b[i] / c[i]);                                             \
        case LERP:                                                                                       \
          if (absolute(s) < real(0.5)) {                                                                 \
            LAZYSTEP_LOOP(a[i] + s * (b[i] - a[i]));                                                     \
          } else {                                                                                       \
            LAZYSTEP_LOOP(b[i] - (b[i] - a[i]) * (1 - s));                                               \
          }                                                                                              \
          break;                                                                                         \
        case SIGN: LAZYSTEP_LOOP(real(a[i] > 0) - real(a[i] < 0));                                       \
      }                                                                                                  \
    }                                                                                                    \
  }

LAZYSTEP_DEFINE_RUN_BLOCK(run_block_float, float, __builtin_sqrtf, __builtin_fabsf)
LAZYSTEP_DEFINE_RUN_BLOCK(run_block_double, double, __builtin_sqrt, __builtin_fabs)

inline void run_block(const Kind& kind, float* const* values, const float* numbers, int64_t n) {
  run_block_float(kind.steps.data(), kind.steps.size(), values, numbers, n);
}
inline void run_block(const Kind& kind, double* const* values, const double* numbers, int64_t n) {
  run_block_double(kind.steps.data(), kind.steps.size(), values, numbers, n);
}

// A lane at run time: where its tensors are, and its numbers in the data type that eager computes in.
struct BoundLane {
  const Kind* kind;
  int64_t size, first_block;
  std::vector<char*> tensors;
  std::vector<float> floats;
  std::vector<double> doubles;
};

template <typename Real>
void run_lane(const BoundLane& lane, const std::vector<Real>& numbers, int64_t begin, int64_t end) {
  const Kind& kind = *lane.kind;
  alignas(64) Real temporaries[kMaxTemporaries][kBlock];
  Real* values[kMaxValues];
  for (int t = 0; t < kind.num_temporaries; ++t) values[kind.num_tensors + t] = temporaries[t];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t start = block * kBlock;
    for (int t = 0; t < kind.num_tensors; ++t) {
      values[t] = reinterpret_cast<Real*>(lane.tensors[t]) + start;
    }
    run_block(kind, values, numbers.data(), std::min(kBlock, lane.size - start));
  }
}

inline void run_blocks(const std::vector<BoundLane>& lanes, int64_t begin, int64_t end) {
  auto after = std::upper_bound(lanes.begin(), lanes.end(), begin,
                                [](int64_t b, const BoundLane& lane) { return b < lane.first_block; });
  for (auto lane = after - 1; lane != lanes.end() && lane->first_block < end; ++lane) {
    const int64_t num_blocks = (lane->size + kBlock - 1) / kBlock;
    const int64_t from = std::max<int64_t>(begin - lane->first_block, 0);
    const int64_t to = std::min(end - lane->first_block, num_blocks);
    if (lane->kind->is_double) {
      run_lane<double>(*lane, lane->doubles, from, to);
    } else {
      run_lane<float>(*lane, lane->floats, from, to);
    }
  }
}

inline double number_at(const at::Tensor& numbers, int64_t index) {
  TORCH_CHECK(index < numbers.numel(), "lazystep::update: there is no number ", index);
  return numbers.scalar_type() == at::kDouble ? numbers.const_data_ptr<double>()[index]
                                              : static_cast<double>(numbers.const_data_ptr<int64_t>()[index]);
}

inline void update(at::TensorList written, at::TensorList read, const std::optional<at::Tensor>& floats,
                   const std::optional<at::Tensor>& ints, c10::string_view text) {
  const int64_t num_written = static_cast<int64_t>(written.size());
  const auto tensor_at = [&](int64_t index) -> const at::Tensor& {
    TORCH_CHECK(index < num_written + static_cast<int64_t>(read.size()), "lazystep::update: no such tensor");
    return index < num_written ? written[index] : read[index - num_written];
  };
  const auto number_from = [&](int source, int64_t index) {
    if (source == FLOATS) return number_at(floats.value(), index);
    if (source == INTS) return number_at(ints.value(), index);
    return tensor_at(index).item().toDouble();
  };
  if (is_fused_call(text)) return FusedCall(std::string(text), tensor_at, number_from).run();
  const auto code = code_of(std::string(text));
  std::vector<BoundLane> lanes;
  lanes.reserve(code->lanes.size());
  int64_t num_blocks = 0;
  // Everything is checked before anything is written.
  for (const Lane& lane : code->lanes) {
    const Kind& kind = code->kinds[lane.kind];
    const at::Tensor& first = tensor_at(lane.tensors.at(0));
    BoundLane bound{&kind, first.numel(), num_blocks, {}, {}, {}};
    if (bound.size == 0) continue;
    bound.tensors.reserve(lane.tensors.size());
    for (const int64_t index : lane.tensors) {
      const at::Tensor& tensor = tensor_at(index);
      TORCH_CHECK(tensor.scalar_type() == (kind.is_double ? at::kDouble : at::kFloat) &&
                      same_layout(tensor, first) && tensor.is_non_overlapping_and_dense(),
                  "lazystep::update: the tensors of a lane differ in their layout");
      bound.tensors.push_back(static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())));
    }
    for (const NumberSource& number : lane.numbers) {
      const double value =
          number.source == LITERAL ? number.literal : number_from(number.source, number.index);
      kind.is_double ? bound.doubles.push_back(value) : bound.floats.push_back(static_cast<float>(value));
    }
    if (lane.numbers.empty()) {  // operations without a number read the first one
      kind.is_double ? bound.doubles.push_back(0) : bound.floats.push_back(0);
    }
    num_blocks += (bound.size + kBlock - 1) / kBlock;
    lanes.push_back(std::move(bound));
  }
  if (num_blocks == 0) return;
  // torch splits an iteration over one byte per block between the threads of its pool. Its `parallel_for` is
  // a template that needs this file compiled for the same OpenMP library.
  at::Tensor blocks = at::empty({num_blocks}, at::kByte);
  const char* base = static_cast<const char*>(blocks.const_data_ptr());
  auto iteration = at::TensorIterator::borrowing_nullary_op(blocks);
  iteration.for_each(
      [&](char** data, const int64_t*, int64_t n) { run_blocks(lanes, data[0] - base, data[0] - base + n); },
      kGrain);
}

}  // namespace lazystep

TORCH_LIBRARY_IMPL(lazystep, CPU, library) { library.impl("update", &lazystep::update); }
