#include "kernel.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_dtypes.h>
#include <torch/csrc/utils/tensor_layouts.h>
#include <torch/csrc/utils/tensor_memoryformats.h>
#include <torch/library.h>

#include "autocast.h"
#include "call.h"
#include "host.h"
#include "modes.h"

namespace lazystep {

namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// The methods of the installed object, looked up once. Never destroyed: kernels outlive the interpreter.
struct Python {
  py::object dispatch, traits, decide, check_numbers, refuse_view, run_now, run_handler, source, on_full, count_draw,
      refuse, refuse_autocast;
};

Python& python() {
  static auto* instance = new Python;
  return *instance;
}

std::atomic<bool> is_refused{false};
std::atomic<uint64_t> calls_to_python{0};

// What is known of an op, filled in at its first call.
struct Site {
  std::atomic<bool> is_ready{false};
  Mode mode = Mode::kRecord;
  OpTraits traits;
  Cache cache;
  py::object op;  // torch.ops.<namespace>.<name>.<overload>
  bool is_detach = false;  // no gradient flows through it, whatever view it is called on
  bool is_as_strided = false;
  bool is_slice = false, is_select = false;
  bool has_out = false;
  bool is_foreach = false;  // writes lists of tensors, whose versions torch leaves to the device: see `bump_versions`
};

// -- talking to Python: needs the GIL ----------------------------------------------------------

void prepare(Site& site, const OperatorHandle& op) {
  py::gil_scoped_acquire gil;
  if (site.is_ready) return;  // the GIL is the lock
  const auto& name = op.operator_name();
  auto colons = name.name.find("::");
  py::object ops = py::module_::import("torch").attr("ops");
  site.op = ops.attr(name.name.substr(0, colons).c_str())
                .attr(name.name.substr(colons + 2).c_str())
                .attr(name.overload_name.empty() ? "default" : name.overload_name.c_str());
  auto [mode, takes_number, float_literals, is_writing, needs_nbytes, is_absolute] =
      python().traits(site.op).cast<std::tuple<Mode, std::vector<bool>, bool, bool, bool, bool>>();
  site.mode = mode;
  site.is_detach = name.name == "aten::detach";
  site.is_as_strided = name.name == "aten::as_strided";
  site.is_slice = name.name == "aten::slice" && name.overload_name == "Tensor";
  site.is_select = name.name == "aten::select" && name.overload_name == "int";
  site.is_foreach = is_writing && name.name.rfind("aten::_foreach_", 0) == 0;
  const auto& arguments = op.schema().arguments();
  size_t num_positional = arguments.size();
  while (num_positional > 0 && arguments[num_positional - 1].kwarg_only()) --num_positional;
  site.has_out = std::any_of(arguments.begin() + static_cast<ptrdiff_t>(num_positional), arguments.end(), [](const auto& a) {
    return a.alias_info() != nullptr && a.alias_info()->isWrite();
  });
  site.traits = {
      &op.schema(), num_positional, std::move(takes_number), float_literals, is_writing, needs_nbytes, is_absolute};
  site.is_ready = true;
}

py::object to_python(const c10::Argument& argument, const IValue& value) {
  auto is_a = [&](c10::TypeKind kind) {
    const auto& type = argument.real_type();
    if (type->kind() == kind) return true;
    auto optional = type->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == kind;
  };
  if (value.isNone()) return py::none();
  if (value.isInt()) {
    // These three travel as integers.
    PyObject* object = nullptr;
    if (is_a(c10::TypeKind::ScalarTypeType)) {
      object = reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(value.toInt())));
    } else if (is_a(c10::TypeKind::LayoutType)) {
      object = reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<at::Layout>(value.toInt())));
    } else if (is_a(c10::TypeKind::MemoryFormatType)) {
      object = torch::utils::getTHPMemoryFormat(static_cast<at::MemoryFormat>(value.toInt()));
    }
    if (object != nullptr) return py::reinterpret_borrow<py::object>(object);
  }
  return torch::jit::toPyObject(value);
}

std::pair<py::tuple, py::dict> to_python(const OpTraits& traits, c10::ArrayRef<IValue> values) {
  const auto& arguments = traits.schema->arguments();
  size_t given = num_given(traits, values);
  py::tuple args(given);
  for (size_t i = 0; i < given; ++i) args[i] = to_python(arguments[i], values[i]);
  py::dict kwargs;
  for (size_t i = traits.num_positional; i < values.size(); ++i) {
    if (is_default(arguments[i], values[i])) continue;
    kwargs[arguments[i].name().c_str()] = to_python(arguments[i], values[i]);
  }
  return {std::move(args), std::move(kwargs)};
}

void push(const c10::FunctionSchema& schema, const py::object& out, Stack* stack) {
  const auto& returns = schema.returns();
  if (returns.size() == 1) {
    stack->push_back(torch::jit::toIValue(out, returns[0].real_type()));
  } else if (returns.size() > 1) {
    auto outs = out.cast<py::sequence>();
    for (size_t i = 0; i < returns.size(); ++i) {
      stack->push_back(torch::jit::toIValue(outs[i], returns[i].real_type()));
    }
  }
}

// Runs Python, with the user's modes off. An exception there goes on through torch's C++ as torch's own
// Python kernels' do.
template <typename Function>
auto call_python(const Function& function, bool keep_autocast = false) {
  NoModes no_modes(keep_autocast);
  py::gil_scoped_acquire gil;
  ++calls_to_python;
  try {
    return function();
  } catch (py::error_already_set& error) {
    error.restore();
    throw python_error();
  }
}

// Replace the arguments on the stack by what `call(args, kwargs)` returns.
template <typename Function>
void run_in_python(const Site& site, const OperatorHandle& op, c10::ArrayRef<IValue> values, Stack* stack, const Function& call) {
  call_python([&] {
    auto [args, kwargs] = to_python(site.traits, values);
    py::object out = call(args, kwargs);
    args = py::tuple();  // nothing here holds an operand longer than the op does
    torch::jit::drop(*stack, values.size());
    push(op.schema(), out, stack);
  }, site.mode == Mode::kComposite);
}

void run_handler(const Site& site, const OperatorHandle& op, c10::ArrayRef<IValue> values, Stack* stack) {
  run_in_python(site, op, values, stack, [&](const py::tuple& args, const py::dict& kwargs) {
    return python().run_handler(site.op, args, kwargs);
  });
}

std::shared_ptr<const Line> decide(Site& site, c10::ArrayRef<IValue> values, const Call& call, size_t hash) {
  return call_python([&] {
    auto [args, kwargs] = to_python(site.traits, values);
    py::object decision = python().decide(site.op, args, kwargs);
    return site.cache.add(call, hash, decision.ptr());
  });
}

// Raises what eager raises for these numbers. See [Note: numbers].
void check_numbers(const Site& site, c10::ArrayRef<IValue> values, const Line& line, const Call& call) {
  call_python([&] {
    auto [args, kwargs] = to_python(site.traits, values);
    python().check_numbers(py::handle(line.python.get()), args, kwargs);
  });
  line.decision->set_tried(call.numbers);
}

// [Note: stale views] For most devices autograd differentiates a view as a view of its base's memory.
// For lazy tensors it repeats the view's ops on the base; torch has a fixed list of devices. The two
// agree unless the base, or the view itself, has got another shape in place since (`t_`), or the view was
// made by `as_strided` from another view: it may then see memory that the other view does not.
bool is_stale(const LazyImpl& operand, bool is_written, bool is_recorded) {
  auto* meta = operand.autograd_meta();
  if (meta == nullptr) return false;
  const at::Tensor tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
      const_cast<LazyImpl*>(&operand)));
  auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view == nullptr || !view->has_bw_view()) return false;
  if (!tensor.requires_grad() && !(is_written && is_recorded)) return false;
  const LazyImpl* base = as_lazy(view->get_backward_view().base_.unsafeGetTensorImpl());
  if (base == nullptr) return false;
  if (base->rebinds().num_of_base != operand.rebinds().num_of_base) return true;
  auto version = operand.rebinds().version;
  return version >= 0 && (is_written || version != static_cast<int64_t>(tensor._version()));
}

void refuse_stale_views(const Site& site, const Call& call) {
  if (!at::GradMode::is_enabled()) return;
  bool is_recorded = std::any_of(call.operands.begin(), call.operands.end(), [](const LazyImpl* operand) {
    return operand->requires_grad();
  });
  for (size_t i = 0; i < call.operands.size(); ++i) {
    // Every op that writes writes its first operand.
    if (is_stale(*call.operands[i], site.traits.is_writing && i == 0, is_recorded)) {
      call_python([&] { python().refuse_view(site.op); });
    }
  }
}

[[noreturn]] void raise(const OperandError& error) {
  call_python([&] {
    // A copy: no barrier raises the failure again.
    py::object copy = py::module_::import("lazystep.errors").attr("report")(
        py::reinterpret_borrow<py::object>(error.memory->error.get()));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(copy.ptr())), copy.ptr());
    throw python_error();
  });
  std::abort();  // not reached
}

// The first and the last element that a tensor of this type sees.
std::pair<int64_t, int64_t> span(const Type& type) {
  int64_t last = type.offset;
  for (size_t i = 0; i < type.shape.size(); ++i) last += (type.shape[i] - 1) * type.stride[i];
  return {type.offset, last};
}

// The version of the operand of `as_strided` if that is a view, and the result may see memory beside it; else
// -1. See [Note: stale views].
int64_t version_if_beside(LazyImpl& operand, const Type& result) {
  auto [first, last] = span(result);
  auto [view_first, view_last] = span(*operand.handle()->type);
  if (operand.is_non_overlapping_and_dense() && first >= view_first && last <= view_last) return -1;
  const at::Tensor tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(&operand));
  auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view == nullptr || !view->has_bw_view() || tensor.is_inference()) return -1;
  return static_cast<int64_t>(tensor._version());
}

// CPU's kernel of a `_foreach_` op calls the plain in-place op for each tensor, which tells autograd about the
// write. Here the list is one instruction, and without this a backward pass would not notice that a value it
// has saved is gone.
void bump_versions(const Decision& decision, const Call& call) {
  for (int64_t operand : decision.writes) call.operands[operand]->bump_version();
}

// -- the hot path: no GIL ----------------------------------------------------------------------

// The types of what a call makes: a view begins where its operand begins, and further by what the decision says.
void find_types(const Decision& decision, const Call& call, c10::SmallVectorImpl<Ptr<Type>>& types) {
  for (const auto& [type, alias, nbytes] : decision.made) {
    int64_t shift = alias < 0 ? 0 : call.operands[alias]->handle()->type->offset - decision.offsets[alias];
    types.push_back(shift == 0 ? type : type_at(*type, type->offset + shift));
  }
}

Afterwards record(
    const Site& site, const Ptr<Decision>& decision, const Call& call, c10::ArrayRef<Ptr<Type>> types,
    size_t num_arguments, bool returns, Stack* stack) {
  const bool has_out = site.has_out;
  c10::SmallVector<Handle*, 8> operands;
  for (LazyImpl* operand : call.operands) operands.push_back(operand->handle().get());
  c10::SmallVector<Ptr<Handle>, 4> made;
  Afterwards afterwards;
  try {
    afterwards = recorder().record(decision, operands, call.numbers, types, site.traits.is_absolute, made);
  } catch (const OperandError& error) {
    raise(error);
  }
  size_t num_new = made.size() - decision->rebinds.size();
  for (size_t i = 0; i < decision->rebinds.size(); ++i) {
    call.operands[decision->rebinds[i]]->retype(std::move(made[num_new + i]), has_out);
  }
  c10::SmallVector<at::Tensor, 4> results;
  for (const auto& [kind, number] : decision->results) {
    if (kind == Decision::Result::kMade) {
      int64_t base = decision->made[number].alias;
      results.push_back(
          base < 0 ? make_tensor(std::move(made[number]))
                   : make_view(std::move(made[number]), *call.operands[base]));
    } else if (kind == Decision::Result::kOperand) {
      results.push_back(at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
          call.operands[number])));
    } else {
      results.emplace_back();
    }
  }
  torch::jit::drop(*stack, num_arguments);
  if (decision->structure == Decision::kList) {
    stack->emplace_back(std::vector<at::Tensor>(results.begin(), results.end()));
  } else if (returns) {
    for (at::Tensor& result : results) stack->emplace_back(std::move(result));
  }
  return afterwards;
}

// Tell the lines of new entries, and cut a recording that is full. Runs Python.
void after_recording(const Afterwards& afterwards) {
  if (afterwards.first < afterwards.last) {
    Ptr<PyBox> source = call_python([&]() -> Ptr<PyBox> {
      py::object line = python().source();
      return line.is_none() ? nullptr : c10::make_intrusive<PyBox>(line.ptr());
    });
    if (source) recorder().set_source(afterwards, source);
  }
  if (afterwards.is_full) call_python([] { python().on_full(); });
}

// [Note: windows] A slice of a value that is there already, or that a queued step makes, is taken without an
// instruction: it becomes an input of what is recorded with it. So the place of a slice of a dataset is no part of a
// program. The call of a captured step is told apart: there each input must have a place that a replay can read.
// So is a value that wants a gradient, such as a parameter: its slices lie in memory that the step writes, and
// a library is better off with one input there. Returns null for a call that has to be decided.
Ptr<Type> window_type(const Site& site, const Type& type, c10::ArrayRef<IValue> values) {
  auto rank = static_cast<int64_t>(type.shape.size());
  if (rank == 0 || !type.is_strided || type.conj || type.neg || !values[1].isInt()) return nullptr;
  int64_t dim = values[1].toInt();
  if (dim < -rank || dim >= rank) return nullptr;
  if (dim < 0) dim += rank;
  c10::SmallVector<int64_t, 5> shape(type.shape), stride(type.stride);
  int64_t size = shape[dim];
  if (site.is_select) {  // select(self, dim, index)
    if (!values[2].isInt()) return nullptr;
    int64_t index = values[2].toInt();
    if (index < -size || index >= size) return nullptr;
    if (index < 0) index += size;
    int64_t offset = type.offset + index * stride[dim];
    shape.erase(shape.begin() + dim);
    stride.erase(stride.begin() + dim);
    return type_at(type, shape, stride, offset);
  }
  // slice(self, dim, start, end, step)
  if (!values[4].isInt() || values[4].toInt() <= 0) return nullptr;
  auto bound = [&](const IValue& value, int64_t missing) {
    int64_t place = value.isInt() ? value.toInt() : missing;
    if (place < 0) place += size;
    return std::clamp<int64_t>(place, 0, size);
  };
  if (!(values[2].isInt() || values[2].isNone()) || !(values[3].isInt() || values[3].isNone())) return nullptr;
  int64_t start = bound(values[2], 0), end = std::max(bound(values[3], size), start), step = values[4].toInt();
  int64_t offset = type.offset + start * stride[dim];
  shape[dim] = (end - start + step - 1) / step;
  stride[dim] *= step;
  return type_at(type, shape, stride, offset);
}

bool take_window(const Site& site, const Call& call, c10::ArrayRef<IValue> values, Stack* stack) {
  LazyImpl& operand = *call.operands[0];
  const Ptr<Handle>& whole = operand.handle();
  if (operand.requires_grad() || recorder().index_in_current(*whole) >= 0) return false;
  Ptr<Type> type = window_type(site, *whole->type, values);
  if (!type) return false;
  auto handle = c10::make_intrusive<Handle>(std::move(type), whole->memory);
  handle->base = whole->base ? whole->base : whole;
  whole->pristine = false;  // from now on the host may not fill it directly
  size_t num_arguments = values.size();
  at::Tensor window = make_view(std::move(handle), operand);
  torch::jit::drop(*stack, num_arguments);
  stack->emplace_back(std::move(window));
  return true;
}

void run(Site& site, const OperatorHandle& op, Stack* stack) {
  if (is_refused) call_python([] { python().refuse(); });
  if (is_autocast_out_of_step()) call_python([] { python().refuse_autocast(); });
  bool is_observed = recorder().observed.notice_op();
  if (!site.is_ready) prepare(site, op);
  const auto& schema = op.schema();
  size_t num_arguments = schema.arguments().size();
  auto values = torch::jit::last(*stack, num_arguments);
  if (site.mode == Mode::kHandler || site.mode == Mode::kComposite) return run_handler(site, op, values, stack);
  if (site.mode == Mode::kEmpty) {
    if (is_observed || !make_on_host(op, stack, false, true)) run_handler(site, op, values, stack);
    return;
  }
  if (site.mode == Mode::kToCopy && copy_from_host(op, stack)) return;
  Call call;
  if (!call.read(site.traits, values)) return run_handler(site, op, values, stack);
  if (has_rebound && !site.is_detach) refuse_stale_views(site, call);
  if (site.mode == Mode::kDetach) {
    at::Tensor other = make_view(call.operands[0]->handle(), *call.operands[0]);
    torch::jit::drop(*stack, num_arguments);
    stack->emplace_back(std::move(other));
    return;
  }
  if (site.mode == Mode::kOverwrite && call.operands[0]->handle()->memory->has_error) {
    return run_handler(site, op, values, stack);
  }
  if ((site.is_slice || site.is_select) && !is_observed && take_window(site, call, values, stack)) return;
  size_t hash = call.hash();
  auto line = site.cache.find(call, hash);
  if (line == nullptr) line = decide(site, values, call, hash);
  if (line->action == Line::kRecord) {
    if (!line->decision->has_tried(call.numbers)) check_numbers(site, values, *line, call);
    if (site.is_foreach) bump_versions(*line->decision, call);
    c10::SmallVector<Ptr<Type>, 4> types;
    find_types(*line->decision, call, types);
    int64_t version = site.is_as_strided ? version_if_beside(*call.operands[0], *types[0]) : -1;
    Afterwards afterwards =
        record(site, line->decision, call, types, num_arguments, !schema.returns().empty(), stack);
    if (version >= 0) as_lazy(stack->back().toTensor().unsafeGetTensorImpl())->note_view_of_memory(version);
    return after_recording(afterwards);
  }
  if (line->action == Line::kDraw && !is_observed && make_on_host(op, stack, site.traits.is_writing, false)) {
    call_python([] { python().count_draw(); });
    return;
  }
  run_in_python(site, op, values, stack, [&](const py::tuple& args, const py::dict& kwargs) {
    return python().run_now(py::handle(line->python.get()), args, kwargs);
  });
}

// -- registration ------------------------------------------------------------------------------

struct Kernel final : c10::OperatorKernel {
  explicit Kernel(Site* site) : site(site) {}
  void operator()(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { run(*site, op, stack); }
  Site* site;
};

// For ops that were not there when kernels were registered.
void fallback(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  static auto* mutex = new std::mutex;
  static auto* sites = new std::unordered_map<c10::OperatorName, Site*>;
  Site* site = nullptr;
  {
    std::lock_guard lock(*mutex);
    Site*& found = (*sites)[op.operator_name()];
    if (found == nullptr) found = new Site;
    site = found;
  }
  run(*site, op, stack);
}

// Registrations last as long as the process.
void keep(c10::RegistrationHandleRAII handle) {
  static auto* handles = new std::vector<c10::RegistrationHandleRAII>;
  handles->push_back(std::move(handle));
}

}  // namespace

void install(const py::object& dispatch) {
  auto method = [&](const char* name) { return py::object(dispatch.attr(name)); };
  python() = {
      dispatch, method("traits"), method("decide"), method("check_numbers"), method("refuse_view"),
      method("run_now"), method("run_handler"), method("source"), method("on_full"), method("count_draw"), method("refuse"),
      method("refuse_autocast")};
}

py::object installed() { return python().dispatch; }

void register_kernel(const std::string& name, const std::string& overload) {
  // By name: an op may be removed and defined anew, with another schema.
  static auto* sites = new std::unordered_map<c10::OperatorName, Site*>;
  auto [found, is_new] = sites->try_emplace(c10::OperatorName(name, overload), nullptr);
  if (!is_new) {
    found->second->cache.clear();
    found->second->is_ready = false;
    return;
  }
  found->second = new Site;
  auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(found->second));
  keep(c10::Dispatcher::singleton().registerImpl(
      {name, overload}, c10::DispatchKey::Lazy, std::move(kernel), std::nullopt, nullptr, "lazystep"));
}

void register_fallback() {
  // The other two are asked for tensors that are not there yet: results with a sparse layout.
  for (auto key : {c10::DispatchKey::Lazy, c10::DispatchKey::SparseLazy, c10::DispatchKey::SparseCsrLazy}) {
    keep(c10::Dispatcher::singleton().registerFallback(
        key, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), "lazystep"));
  }
}

void register_sparse_kernel(const std::string& name, const std::string& overload) {
  keep(c10::Dispatcher::singleton().registerImpl(
      {name, overload}, c10::DispatchKey::SparseCsrLazy, c10::KernelFunction::makeFromBoxedFunction<&fallback>(),
      std::nullopt, nullptr, "lazystep"));
}

void refuse() { is_refused = true; }

bool is_stale_view(const at::Tensor& tensor) {
  const LazyImpl* lazy = has_rebound ? as_lazy(tensor.unsafeGetTensorImpl()) : nullptr;
  return lazy != nullptr && is_stale(*lazy, false, false);
}

uint64_t num_calls_to_python() { return calls_to_python; }

}  // namespace lazystep
