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
  std::map<std::string, py::object> kernels;  // of Python, by the operator's name
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

// Returns whether a call writes memory that it reads. torch accepts some of these calls.
inline bool writes_over_an_operand(const Operands& operands) {
  const auto overlaps = [&](const at::Tensor* read) {
    return read != nullptr && overlap(*operands.out, *read);
  };
  return operands.out != nullptr &&
      (overlaps(operands.a) || overlaps(operands.b) || overlaps(operands.c));
}

// Runs the plan of a call that was decided before. The GIL is held.
inline std::optional<at::Tensor> attempt(const Operands& operands, Options options) {
  if (is_choosing) {
    return std::nullopt;
  }
  if (!are_plain(operands) || writes_over_an_operand(operands)) {
    return std::nullopt;
  }
  options.batch_invariant = overrides().batch_invariant || is_on(state().invariance);
  const auto plan = find_plan(operands, options);
  if (!plan) {
    return std::nullopt;
  }
  return plan->run(operands, options.alpha, options.beta);
}

using py::literals::operator""_a;

template <typename... Given>
at::Tensor by_python(const char* name, Given&&... given) {
  const py::object kernel = overrides().kernels.at(name);  // another may take its place meanwhile
  return THPVariable_Unpack(kernel(std::forward<Given>(given)...).ptr());
}

inline at::Tensor mm(c10::DispatchKeySet keys, const at::Tensor& a, const at::Tensor& b) {
  const py::gil_scoped_acquire gil;
  const auto found = attempt({&a, &b}, {Kind::aten_mm});
  return found ? *found : by_python("mm", keys, a, b);
}

inline at::Tensor& mm_out(
    c10::DispatchKeySet keys, const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  const py::gil_scoped_acquire gil;
  Operands operands{&a, &b};
  operands.out = &out;
  if (!attempt(operands, {Kind::aten_mm})) {
    by_python("mm.out", keys, a, b, "out"_a = out);
  }
  return out;
}

inline at::Tensor bmm(c10::DispatchKeySet keys, const at::Tensor& a, const at::Tensor& b) {
  const py::gil_scoped_acquire gil;
  const auto found = attempt({&a, &b}, {Kind::aten_bmm});
  return found ? *found : by_python("bmm", keys, a, b);
}

inline at::Tensor& bmm_out(
    c10::DispatchKeySet keys, const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  const py::gil_scoped_acquire gil;
  Operands operands{&a, &b};
  operands.out = &out;
  if (!attempt(operands, {Kind::aten_bmm})) {
    by_python("bmm.out", keys, a, b, "out"_a = out);
  }
  return out;
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

inline std::optional<at::Tensor> attempt_addmm(
    const Operands& operands, const at::Scalar& beta, const at::Scalar& alpha) {
  if (alpha.isComplex() || beta.isComplex() || alpha.isBoolean() || beta.isBoolean()) {
    return std::nullopt;
  }
  Options options{Kind::aten_addmm};
  options.alpha = alpha.toDouble();
  options.beta = beta.toDouble();
  return attempt(operands, options);
}

inline at::Tensor addmm(
    c10::DispatchKeySet keys,
    const at::Tensor& c,
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Scalar& beta,
    const at::Scalar& alpha) {
  const py::gil_scoped_acquire gil;
  if (const auto found = attempt_addmm({&a, &b, &c}, beta, alpha)) {
    return *found;
  }
  return by_python(
      "addmm", keys, c, a, b, "beta"_a = number(beta), "alpha"_a = number(alpha));
}

inline at::Tensor& addmm_out(
    c10::DispatchKeySet keys,
    const at::Tensor& c,
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Scalar& beta,
    const at::Scalar& alpha,
    at::Tensor& out) {
  const py::gil_scoped_acquire gil;
  Operands operands{&a, &b, &c};
  operands.out = &out;
  if (!attempt_addmm(operands, beta, alpha)) {
    by_python(
        "addmm.out",
        keys,
        c,
        a,
        b,
        "beta"_a = number(beta),
        "alpha"_a = number(alpha),
        "out"_a = out);
  }
  return out;
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
  } else if (name == "mm.out") {
    library->impl("mm.out", TORCH_FN(mm_out));
  } else if (name == "bmm") {
    library->impl("bmm", TORCH_FN(bmm));
  } else if (name == "bmm.out") {
    library->impl("bmm.out", TORCH_FN(bmm_out));
  } else if (name == "addmm") {
    library->impl("addmm", TORCH_FN(addmm));
  } else if (name == "addmm.out") {
    library->impl("addmm.out", TORCH_FN(addmm_out));
  } else {
    return false;
  }
  std::swap(overrides().kernels[name], kernel);  // freed at the end: that may run Python code
  overrides().registrations.push_back(std::move(library));
  return true;
}

// Gives the operators back to the kernels that they had before. Those of Python stay until others
// take their places: a thread may be on the way to one.
inline void uninstall() { overrides().registrations.clear(); }

}  // namespace outblas
