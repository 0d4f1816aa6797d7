// Calls of `linear` and of `matmul`, and the autograd function of `linear`.
//
//     dinput = g weight    dweight = gᵀ input    dbias = g, summed over rows    dresidual = g
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "entry.h"

namespace outblas {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns A B, by Python where calls like it were not planned here.
inline at::Tensor product(const at::Tensor& a, const at::Tensor& b, bool batch_invariant) {
  const py::gil_scoped_acquire gil;
  const bool recorded =
      c10::GradMode::is_enabled() && (a.requires_grad() || b.requires_grad());
  if (!recorded && !is_observed()) {
    const Operands operands{&a, &b};
    if (const auto plan = find_plan(operands, {Kind::matmul, batch_invariant})) {
      return plan->run(operands, 1, 0);
    }
  }
  const auto found = py::reinterpret_borrow<py::object>(state().product)(a, b, batch_invariant);
  return THPVariable_Unpack(found.ptr());
}

// Returns a batch of matrices as one matrix. `flatten` has no rule for batches of gradients.
inline at::Tensor as_rows(const at::Tensor& t) {
  if (t.dim() == 2) {
    return t;
  }
  const auto sizes = t.sym_sizes();
  c10::SymInt rows = 1;
  for (const c10::SymInt& size : sizes.slice(0, sizes.size() - 1)) {
    rows *= size;
  }
  return t.reshape_symint({rows, sizes.back()});
}

// What a call of `linear` was given besides input and weight.
struct Given {
  bool bias = true;
  bool residual = false;
  bool batch_invariant = false;

  Given() = default;
  Given(bool bias, bool residual, bool batch_invariant)
      : bias(bias), residual(residual), batch_invariant(batch_invariant) {}
  explicit Given(int64_t number)
      : bias(number & 1), residual(number & 2), batch_invariant(number & 4) {}

  int64_t as_number() const { return bias | residual << 1 | batch_invariant << 2; }

  // Whether it is a layer's call, of which nothing is kept.
  bool is_usual() const { return as_number() == Given().as_number(); }
};

struct LinearBackward : torch::autograd::Function<LinearBackward> {
  static constexpr const char* GIVEN = "given";

  // Computes a call by its plan. The GIL is held.
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias,
      const std::optional<at::Tensor>& residual,
      Plan* plan,
      bool batch_invariant) {
    const Operands operands{
        &input, &weight, nullptr, bias ? &*bias : nullptr, residual ? &*residual : nullptr};
    ctx->save_for_backward(
        {weight.requires_grad() ? input : at::Tensor(),
         input.requires_grad() ? weight : at::Tensor()});
    ctx->set_materialize_grads(false);
    const Given given{bias.has_value(), residual.has_value(), batch_invariant};
    if (!given.is_usual()) {
      ctx->saved_data[GIVEN] = given.as_number();
    }
    return plan->run(operands, 1, 0);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list found(6);
    at::Tensor& g = grads[0];
    if (!g.defined()) {
      return found;
    }
    const variable_list saved = ctx->get_saved_variables();
    const auto unusual = ctx->saved_data.find(GIVEN);
    const Given given = unusual == ctx->saved_data.end() ? Given() : Given(unusual->second.toInt());
    size_t edge = 2;  // there is one for each tensor that the call had
    if (given.bias && ctx->needs_input_grad(edge++)) {
      found[2] = as_rows(g).sum(0);
    }
    if (given.residual && ctx->needs_input_grad(edge)) {
      found[3] = g;  // autograd itself sums the gradient of a residual of fewer elements
    }
    if (ctx->needs_input_grad(0)) {
      found[0] = product(g, saved[1], given.batch_invariant);
    }
    if (ctx->needs_input_grad(1)) {
      const at::Tensor rows = as_rows(g);
      found[1] = product(
          is_plain(rows) && !c10::GradMode::is_enabled() ? transposed(rows) : rows.t(),
          as_rows(saved[0]),
          given.batch_invariant);
    }
    return found;
  }
};

// Reads an argument that is a tensor or None. Returns false for any other type, subclasses of
// tensors among them.
inline bool read(PyObject* given, const at::Tensor*& tensor) {
  if (given == Py_None) {
    return true;
  }
  if (!THPVariable_CheckTypeExact(Py_TYPE(given))) {
    return false;
  }
  tensor = &THPVariable_Unpack(given);
  return true;
}

// Reads `batch_invariant`: True, False, or None for the flag's value.
inline bool read_invariance(PyObject* given, bool& batch_invariant) {
  if (given == Py_None) {
    batch_invariant = is_on(state().invariance);
    return true;
  }
  batch_invariant = given == Py_True;
  return given == Py_True || given == Py_False;
}

inline bool any_requires_grad(const Operands& given) {
  for (const at::Tensor* t : {given.a, given.b, given.c, given.bias, given.residual}) {
    if (t != nullptr && t->requires_grad()) {
      return true;
    }
  }
  return false;
}

// linear(input, weight, bias, activation, residual, batch_invariant) -> Tensor, or None where there
// is no plan for such a call, or something would see it. Arguments may have any type.
inline PyObject* linear(PyObject* const* given, Py_ssize_t count) {
  Operands operands;
  Options options{Kind::linear};
  if (count != 6 || is_observed() || !read(given[0], operands.a) || operands.a == nullptr ||
      !read(given[1], operands.b) || operands.b == nullptr || !read(given[2], operands.bias) ||
      !read(given[4], operands.residual) || !read_invariance(given[5], options.batch_invariant) ||
      is_on(state().readiness)) {
    return nullptr;
  }
  options.activation = number_of(given[3]);
  if (options.activation < 0) {
    return nullptr;
  }
  options.recorded = c10::GradMode::is_enabled() && any_requires_grad(operands);
  // The function of Python adds the gradient of the weight to the one that is there.
  if (options.recorded && is_on(state().accumulation)) {
    return nullptr;
  }
  const auto plan = find_plan(operands, options);
  if (!plan) {
    return nullptr;
  }
  if (!options.recorded) {
    return THPVariable_Wrap(plan->run(operands, 1, 0));
  }
  const auto optional = [](const at::Tensor* t) {
    return t == nullptr ? std::optional<at::Tensor>() : *t;
  };
  return THPVariable_Wrap(LinearBackward::apply(
      *operands.a,
      *operands.b,
      optional(operands.bias),
      optional(operands.residual),
      plan.get(),
      options.batch_invariant));
}

// matmul(a, b, batch_invariant) -> Tensor or None, as `linear`.
inline PyObject* matmul(PyObject* const* given, Py_ssize_t count) {
  Operands operands;
  Options options{Kind::matmul};
  if (count != 3 || is_observed() || !read(given[0], operands.a) || operands.a == nullptr ||
      !read(given[1], operands.b) || operands.b == nullptr ||
      !read_invariance(given[2], options.batch_invariant) ||
      (c10::GradMode::is_enabled() && any_requires_grad(operands))) {
    return nullptr;
  }
  const auto plan = find_plan(operands, options);
  return plan ? THPVariable_Wrap(plan->run(operands, 1, 0)) : nullptr;
}

}  // namespace outblas
