// Kernels of aten's products under `outblas.enable`. They run the plans of calls that Python took
// before, and call Python's kernels for all others.
#pragma once

#include <torch/library.h>

#include <map>
#include <memory>
#include <string>

#include "entry.h"

namespace outblas {

struct Overrides {
  std::map<std::string, PyObject*> kernels;  // of Python, by the operator's name
  std::vector<std::unique_ptr<torch::Library>> registrations;
  bool batch_invariant = false;
};

inline Overrides& overrides() {
  static auto* const made = new Overrides;
  return *made;
}

// Whether this thread chooses a kernel. Its products belong to torch then, which Python's kernels
// know.
inline thread_local bool is_choosing = false;

// Runs the plan of a call that was decided before. The GIL is held.
inline std::optional<at::Tensor> attempt(const Operands& operands, Options options) {
  if (is_choosing) {
    return std::nullopt;
  }
  options.batch_invariant = overrides().batch_invariant || is_on(state().invariance);
  const auto plan = find_plan(operands, options);
  if (!plan) {
    return std::nullopt;
  }
  return plan->run(operands, options.alpha, options.beta);
}

template <typename... Given>
at::Tensor by_python(const char* name, const Given&... given) {
  const auto kernel = py::reinterpret_borrow<py::object>(overrides().kernels.at(name));
  return THPVariable_Unpack(kernel(given...).ptr());
}

inline at::Tensor mm(c10::DispatchKeySet keys, const at::Tensor& a, const at::Tensor& b) {
  const py::gil_scoped_acquire gil;
  const auto found = attempt({&a, &b}, {Kind::aten_mm});
  return found ? *found : by_python("mm", keys, a, b);
}

inline at::Tensor bmm(c10::DispatchKeySet keys, const at::Tensor& a, const at::Tensor& b) {
  const py::gil_scoped_acquire gil;
  const auto found = attempt({&a, &b}, {Kind::aten_bmm});
  return found ? *found : by_python("bmm", keys, a, b);
}

// A number as Python has it: integers stay integers.
inline py::object number(const at::Scalar& given) {
  if (given.isBoolean()) {
    return py::bool_(given.toBool());
  }
  if (given.isIntegral(false)) {
    return py::int_(given.toLong());
  }
  return given.isComplex() ? py::cast(given.toComplexDouble())
                           : py::object(py::float_(given.toDouble()));
}

inline at::Tensor addmm(
    c10::DispatchKeySet keys,
    const at::Tensor& c,
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Scalar& beta,
    const at::Scalar& alpha) {
  const py::gil_scoped_acquire gil;
  if (!alpha.isComplex() && !beta.isComplex() && !alpha.isBoolean() && !beta.isBoolean()) {
    Options options{Kind::aten_addmm};
    options.alpha = alpha.toDouble();
    options.beta = beta.toDouble();
    if (const auto found = attempt({&a, &b, &c}, options)) {
      return *found;
    }
  }
  const auto kernel = py::reinterpret_borrow<py::object>(overrides().kernels.at("addmm"));
  using py::literals::operator""_a;
  const auto found =
      kernel(keys, c, a, b, "beta"_a = number(beta), "alpha"_a = number(alpha));
  return THPVariable_Unpack(found.ptr());
}

// torch warns, once in a process, that an operator has a kernel already.
class NoWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// Overrides an operator of aten at a dispatch key. Returns false for one that this module has not.
inline bool install(const std::string& name, const std::string& key, py::object kernel) {
  NoWarnings handler;
  const c10::WarningUtils::WarningHandlerGuard quiet(&handler);
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::parseDispatchKey(key), __FILE__, __LINE__);
  if (name == "mm") {
    library->impl("mm", TORCH_FN(mm));
  } else if (name == "bmm") {
    library->impl("bmm", TORCH_FN(bmm));
  } else if (name == "addmm") {
    library->impl("addmm", TORCH_FN(addmm));
  } else {
    return false;
  }
  overrides().kernels[name] = kernel.release().ptr();
  overrides().registrations.push_back(std::move(library));
  return true;
}

// Gives the operators back to the kernels that they had before. Those of Python stay: a thread may
// be inside of one.
inline void uninstall() { overrides().registrations.clear(); }

}  // namespace outblas
