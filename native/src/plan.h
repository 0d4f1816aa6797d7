// A plan that Python made, as this module runs it: it allocates the output and launches the kernel.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "call_key.h"
#include "ffi_launch.h"

namespace outblas {

namespace py = pybind11;

// The view of a matrix with rows and columns exchanged, which autograd does not see.
inline at::Tensor transposed(const at::Tensor& t) {
  auto view = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  const std::array<int64_t, 2> sizes{t.size(1), t.size(0)}, strides{t.stride(1), t.stride(0)};
  view->set_sizes_and_strides(sizes, strides, t.storage_offset());
  return at::Tensor(std::move(view));
}

// Returns whether the memory that two tensors span has bytes in common.
inline bool overlap(const at::Tensor& one, const at::Tensor& other) {
  const auto begin = [](const at::Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr());
  };
  const auto end = [&](const at::Tensor& t) {
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) {
      last += (t.size(i) - 1) * t.stride(i);
    }
    return t.numel() == 0 ? begin(t) : begin(t) + (last + 1) * t.element_size();
  };
  return begin(one) < end(other) && begin(other) < end(one);
}

struct Plan {
  py::object execute;  // Python's own plan(a, b, c, out, alpha, beta, ...)
  py::object launch;  // launch(a, b, c, out, alpha, beta, ...)
  std::optional<FfiLaunch> ffi_launch;
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
  bool has_epilogue;
  bool several_devices;
  bool transposes;  // whether B is the operand transposed

  at::Tensor run(const Operands& given, double alpha, double beta) {
    const c10::Device device = options.device();
    const bool elsewhere = several_devices && device.is_cuda() &&
        c10::impl::VirtualGuardImpl(device.type()).getDevice() != device;
    const auto& context = at::globalContext();
    const bool fills =
        context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
    if (elsewhere || (fills && given.out == nullptr)) {
      const at::Tensor none;
      return by_python(execute, given, alpha, beta, given.out == nullptr ? none : *given.out);
    }
    const at::Tensor out = given.out == nullptr ? empty() : *given.out;
    if (ffi_launch) {
      const Tensors tensors{given.a, given.b, given.c, &out, given.bias, given.residual};
      if ((*ffi_launch)(tensors, device)) {
        return out;
      }
    }
    by_python(launch, given, alpha, beta, out);
    return out;
  }

 private:
  at::Tensor empty() const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return at::empty_strided(sizes, strides, options);
  }

  // Calls a plan, or its launch, which returns nothing.
  at::Tensor by_python(
      const py::object& function,
      const Operands& given,
      double alpha,
      double beta,
      const at::Tensor& out) const {
    const py::object b = wrapped(transposes ? transposed(*given.b) : *given.b);
    const py::object a = wrapped(*given.a), c = wrapped(given.c), written = wrapped(&out);
    const py::object bias = wrapped(given.bias), residual = wrapped(given.residual);
    const py::object by_alpha = number(alpha), by_beta = number(beta);
    PyObject* arguments[] = {
        a.ptr(), b.ptr(), c.ptr(), written.ptr(), by_alpha.ptr(), by_beta.ptr(), bias.ptr(),
        residual.ptr(), Py_None};
    PyObject* result =
        PyObject_Vectorcall(function.ptr(), arguments, has_epilogue ? 9 : 6, nullptr);
    if (result == nullptr) {
      throw py::error_already_set();
    }
    const py::object kept = py::reinterpret_steal<py::object>(result);
    return THPVariable_Check(result) ? THPVariable_Unpack(result) : at::Tensor();
  }

  static py::object wrapped(const at::Tensor& t) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(t));
  }

  static py::object wrapped(const at::Tensor* t) {
    return t == nullptr || !t->defined() ? py::none() : wrapped(*t);
  }

  static py::object number(double value) {
    const auto integer = static_cast<int64_t>(value);
    return static_cast<double>(integer) == value ? py::object(py::int_(integer))
                                                 : py::object(py::float_(value));
  }
};

}  // namespace outblas
