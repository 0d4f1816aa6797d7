// The way of a call to its plan: what is checked of every call, and what Python is asked where there
// is no plan yet.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <memory>
#include <string>
#include <unordered_map>

#include "plan_table.h"

namespace outblas {

// What the package hands over once. It lives as long as the process: Python's objects cannot be
// freed when the process ends.
struct State {
  PlanTable table;
  int64_t hits = 0, misses = 0;
  std::unordered_map<std::string, int64_t> activations;

  PyObject* invariance = nullptr;  // flags of contexts: `ever` and `requested`
  PyObject* readiness = nullptr;
  PyObject* accumulation = nullptr;
  PyObject* forward_levels = nullptr;  // the module dictionary that has `_current_level`
  PyObject* product = nullptr;  // product(a, b, batch_invariant), differentiable
  PyObject* name_ever = nullptr;
  PyObject* name_requested = nullptr;
  PyObject* name_level = nullptr;
};

inline State& state() {
  static auto* const made = new State;
  return *made;
}

// Returns whether something would see, record or change the call of an operator, apart from
// autograd and what the keys of dispatch say.
inline bool is_observed() {
  if (at::impl::torch_function_mode_enabled() ||
      c10::impl::TorchDispatchModeTLS::any_modes_set() ||
      torch::profiler::impl::profilerEnabled()) {
    return true;
  }
  PyObject* level = PyDict_GetItemWithError(state().forward_levels, state().name_level);
  return level == nullptr || PyLong_AsLong(level) >= 0;
}

// Returns whether a flag is on in this context.
inline bool is_on(PyObject* flag) {
  const auto ever = py::reinterpret_steal<py::object>(PyObject_GetAttr(flag, state().name_ever));
  if (!ever) {
    throw py::error_already_set();
  }
  if (ever.is(py::handle(Py_False))) {
    return false;
  }
  const auto on = py::reinterpret_steal<py::object>(
      PyObject_CallMethodNoArgs(flag, state().name_requested));
  if (!on) {
    throw py::error_already_set();
  }
  return on.is(py::handle(Py_True));
}

// Returns the number of an activation of which there are plans; 0 for none, -1 for any other value.
inline int64_t number_of(PyObject* activation) {
  if (activation == Py_None) {
    return 0;
  }
  if (!PyUnicode_Check(activation)) {
    return -1;
  }
  Py_ssize_t length = 0;
  const char* name = PyUnicode_AsUTF8AndSize(activation, &length);
  if (name == nullptr) {
    throw py::error_already_set();
  }
  if (length == 0) {
    return 0;
  }
  const auto known = state().activations.find(std::string(name, length));
  return known == state().activations.end() ? -1 : known->second;
}

// Returns whether a tensor is a dense one of the CPU or of CUDA, and nothing but that. Subclasses,
// fakes, wrappers of transforms, sparse, nested and lazy tensors have other keys: only torch's
// dispatcher knows what they hold.
inline bool is_plain(const at::Tensor& t) {
  const auto keys = t.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
      c10::autocast_dispatch_keyset;
  return keys == c10::DispatchKeySet(c10::DispatchKey::CPU) ||
      keys == c10::DispatchKeySet(c10::DispatchKey::CUDA);
}

inline bool are_plain(const Operands& operands) {
  for (const at::Tensor* t :
       {operands.a, operands.b, operands.c, operands.bias, operands.residual, operands.out}) {
    if (t != nullptr && !is_plain(*t)) {
      return false;
    }
  }
  return true;
}

// Returns the plan of a call, if calls like it were planned. The caller holds the GIL.
inline std::shared_ptr<Plan> find_plan(const Operands& operands, const Options& options) {
  if (!are_plain(operands)) {
    return nullptr;
  }
  auto found = state().table.find(CallKey(operands, options));
  ++(found ? state().hits : state().misses);
  return found;
}

}  // namespace outblas
