// outblas_native: the host side of warm calls, for the package outblas, which works without it.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "aten.h"
#include "entry.h"
#include "linear.h"

namespace outblas {
namespace {

// Runs a function that returns a new reference, or null for None. Exceptions become Python's, and
// those of Python, such as a hook's of autograd, stay what they are.
template <PyObject* (*function)(PyObject* const*, Py_ssize_t)>
PyObject* called(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PyObject* found = function(given, count);
  if (found == nullptr) {
    Py_RETURN_NONE;
  }
  return found;
  END_HANDLE_TH_ERRORS
}

template <PyObject* (*function)(PyObject* const*, Py_ssize_t)>
PyCFunction fast() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called<function>));
}

PyMethodDef FAST[] = {
    {"linear", fast<linear>(), METH_FASTCALL, nullptr},
    {"matmul", fast<matmul>(), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

void configure(
    const py::object& invariance,
    const py::object& readiness,
    const py::object& accumulation,
    const py::object& forward_levels,
    const py::object& product) {
  State& made = state();
  const auto keep = [](const py::object& given) { return py::object(given).release().ptr(); };
  made.invariance = keep(invariance);
  made.readiness = keep(readiness);
  made.accumulation = keep(accumulation);
  made.forward_levels = keep(forward_levels);
  made.product = keep(product);
  made.name_ever = PyUnicode_InternFromString("ever");
  made.name_requested = PyUnicode_InternFromString("requested");
  made.name_level = PyUnicode_InternFromString("_current_level");
}

// Takes the functions of TVM FFI, as addresses.
void load_ffi(intptr_t call, intptr_t take_error, intptr_t release, intptr_t set_stream) {
  FfiLibrary& library = ffi();
  library.call = reinterpret_cast<decltype(library.call)>(call);
  library.take_error = reinterpret_cast<decltype(library.take_error)>(take_error);
  library.release = reinterpret_cast<decltype(library.release)>(release);
  library.set_stream = reinterpret_cast<decltype(library.set_stream)>(set_stream);
}

std::optional<DLDataType> dl_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DLDataType{kDLFloat, 16, 1};
    case at::kBFloat16:
      return DLDataType{kDLBfloat, 16, 1};
    case at::kFloat:
      return DLDataType{kDLFloat, 32, 1};
    case at::kInt:
      return DLDataType{kDLInt, 32, 1};
    default:
      return std::nullopt;
  }
}

// Reads a kernel's arguments: None, an int, a float, "alpha" or "beta", a tensor that is the same in
// every launch, or (index, dtype, shape, strides) for a view of a tensor of the call.
std::optional<FfiLaunch> ffi_launch(const py::object& given, double alpha, double beta) {
  if (given.is_none() || !ffi().loaded()) {
    return std::nullopt;
  }
  const auto [function, values] = given.cast<std::pair<intptr_t, py::list>>();
  if (values.size() > FfiLaunch::MOST_ARGUMENTS) {
    return std::nullopt;
  }
  std::vector<FfiArgument> arguments(values.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    FfiArgument& argument = arguments[i];
    const py::object value = values[i];
    std::optional<at::ScalarType> dtype;
    if (value.is_none()) {
      argument.value.integer = 0;
      continue;
    }
    if (py::isinstance<py::int_>(value)) {
      argument.value.type = FFI_INT;
      argument.value.integer = value.cast<int64_t>();
      continue;
    }
    if (py::isinstance<py::float_>(value)) {
      argument.value.type = FFI_FLOAT;
      argument.value.floating = value.cast<double>();
      continue;
    }
    if (py::isinstance<py::str>(value)) {
      argument.value.type = FFI_FLOAT;
      argument.value.floating = value.cast<std::string>() == "alpha" ? alpha : beta;
      continue;
    }
    if (THPVariable_Check(value.ptr())) {
      argument.constant = THPVariable_Unpack(value.ptr());
      dtype = argument.constant->scalar_type();
      argument.shape = argument.constant->sizes().vec();
      argument.strides = argument.constant->strides().vec();
    } else {
      const auto view = value.cast<py::tuple>();
      argument.tensor = view[0].cast<int>();
      dtype = view[1].cast<at::ScalarType>();
      argument.shape = view[2].cast<std::vector<int64_t>>();
      argument.strides = view[3].cast<std::vector<int64_t>>();
    }
    const auto type = dl_type(*dtype);
    if (!type) {
      return std::nullopt;
    }
    argument.dtype = *type;
  }
  return FfiLaunch(reinterpret_cast<void*>(function), std::move(arguments));
}

// Remembers the plan of calls like this one, which must be made in the state of torch in which the
// calls are. Returns whether others were forgotten for it.
//
// tensors: a, b, c, bias, residual, out; None for those that the call has not. `b` of linear is the
// weight. output: its sizes, strides, dtype and device.
bool remember(
    int kind,
    const std::array<std::optional<at::Tensor>, 6>& tensors,
    const std::string& activation,
    bool batch_invariant,
    bool recorded,
    std::pair<double, double> alpha_beta,
    py::object execute,
    py::object launch,
    std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType, at::Device> output,
    bool has_epilogue,
    bool several_devices,
    const py::object& ffi,
    size_t most_plans) {
  const auto given = [&](int i) { return tensors[i] ? &*tensors[i] : nullptr; };
  const Operands operands{given(0), given(1), given(2), given(3), given(4), given(5)};
  Options options{static_cast<Kind>(kind), batch_invariant, recorded};
  if (!activation.empty()) {
    auto& known = state().activations;
    const auto next = static_cast<int64_t>(known.size()) + 1;
    options.activation = known.try_emplace(activation, next).first->second;
  }
  std::tie(options.alpha, options.beta) = alpha_beta;
  auto& [sizes, strides, dtype, device] = output;
  auto plan = std::make_shared<Plan>(Plan{
      std::move(execute),
      std::move(launch),
      ffi_launch(ffi, options.alpha, options.beta),
      std::move(sizes),
      std::move(strides),
      at::TensorOptions().dtype(dtype).device(device),
      has_epilogue,
      several_devices,
      options.kind == Kind::linear});
  return state().table.add(CallKey(operands, options), std::move(plan), most_plans);
}

}  // namespace
}  // namespace outblas

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace outblas;
  m.attr("TORCH") = TORCH_VERSION;
  m.attr("INTERFACE") = 3;
  if (PyModule_AddFunctions(m.ptr(), FAST) != 0) {
    throw py::error_already_set();
  }
  m.def("configure", &configure);
  m.def("load_ffi", &load_ffi);
  m.def("remember", &remember);
  m.def("clear", [] { state().table.clear(); });
  m.def("counts", [] {
    return std::make_tuple(state().table.size(), state().hits, state().misses);
  });
  m.def("install", &install);
  m.def("uninstall", &uninstall);
  m.def("set_batch_invariant", [](bool value) { overrides().batch_invariant = value; });
  m.def("set_choosing", [](bool value) { is_choosing = value; });
  m.def("set_sm_limit", [](int64_t count) { sm_limit = count; });
}
