// Launches a kernel that was compiled as a function of TVM FFI, by its C interface: the host's work
// is to fill in the addresses of tensors whose shapes and strides are known.
//
// The layouts are those of tvm/ffi/c_api.h and dlpack.h. Its functions come as addresses from
// Python, which has loaded the library, so that nothing is linked.
#pragma once

#include <ATen/ATen.h>
#include <ATen/DLConvertor.h>
#include <ATen/dlpack.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace outblas {

// TVMFFIAny: the type of a value, and the value.
struct FfiValue {
  int32_t type = 0;
  uint32_t padding = 0;
  union {
    int64_t integer;
    double floating;
    void* pointer;
  };
};
static_assert(sizeof(FfiValue) == 16, "as TVMFFIAny");

constexpr int32_t FFI_NONE = 0, FFI_INT = 1, FFI_FLOAT = 3, FFI_DLTENSOR = 7, FFI_OBJECT = 64;

struct FfiLibrary {
  int (*call)(void* function, FfiValue* args, int32_t count, FfiValue* result) = nullptr;
  void (*take_error)(void** error) = nullptr;
  int (*release)(void* object) = nullptr;
  int (*set_stream)(int32_t device_type, int32_t device, void* stream, void** before) = nullptr;

  bool loaded() const { return call != nullptr; }
};

inline FfiLibrary& ffi() {
  static FfiLibrary library;
  return library;
}

// One argument of a kernel.
struct FfiArgument {
  // Which of the tensors of a launch it is: `Tensors` below. Negative for a value or a constant.
  int tensor = -1;
  FfiValue value;  // of an argument that is no tensor
  std::optional<at::Tensor> constant;  // the same tensor in every launch
  DLDataType dtype{};
  std::vector<int64_t> shape, strides;
};

// A, B, C, the output, the bias, the residual: the order of a plan's arguments.
using Tensors = std::array<const at::Tensor*, 6>;

class FfiLaunch {
 public:
  static constexpr size_t MOST_ARGUMENTS = 32;

  FfiLaunch(void* function, std::vector<FfiArgument> arguments)
      : function_(function), arguments_(std::move(arguments)) {}

  // Launches on the current stream of the device. Returns whether it did; if not, a launch through
  // Python says why.
  bool operator()(const Tensors& tensors, c10::Device device) {
    std::array<FfiValue, MOST_ARGUMENTS> args;
    std::array<DLTensor, MOST_ARGUMENTS> views;
    const DLDevice on{device.is_cuda() ? kDLCUDA : kDLCPU, device.is_cuda() ? device.index() : 0};
    for (size_t i = 0; i < arguments_.size(); ++i) {
      FfiArgument& argument = arguments_[i];
      if (argument.tensor < 0 && !argument.constant) {
        args[i] = argument.value;
        continue;
      }
      const at::Tensor& t = argument.constant ? *argument.constant : *tensors[argument.tensor];
      views[i] = DLTensor{
          const_cast<void*>(t.const_data_ptr()),
          on,
          static_cast<int32_t>(argument.shape.size()),
          argument.dtype,
          argument.shape.data(),
          argument.strides.data(),
          0};
      args[i].type = FFI_DLTENSOR;
      args[i].pointer = &views[i];
    }
    const OnStream stream(device);
    FfiValue result;
    result.integer = 0;
    const int failed =
        ffi().call(function_, args.data(), static_cast<int32_t>(arguments_.size()), &result);
    if (failed == 0) {
      if (result.type >= FFI_OBJECT) {
        ffi().release(result.pointer);
      }
      return true;
    }
    void* error = nullptr;
    ffi().take_error(&error);
    if (error != nullptr) {
      ffi().release(error);
    }
    return false;
  }

 private:
  // Makes torch's current stream that of TVM FFI.
  class OnStream {
   public:
    explicit OnStream(c10::Device device) : device_(device) {
      if (device.is_cuda()) {
        const c10::impl::VirtualGuardImpl guard(device.type());
        ffi().set_stream(
            kDLCUDA, device.index(), guard.getStream(device).native_handle(), &before_);
      }
    }
    ~OnStream() {
      if (device_.is_cuda()) {
        ffi().set_stream(kDLCUDA, device_.index(), before_, nullptr);
      }
    }
    OnStream(const OnStream&) = delete;
    OnStream& operator=(const OnStream&) = delete;

   private:
    c10::Device device_;
    void* before_ = nullptr;
  };

  void* function_;  // the caller keeps it
  std::vector<FfiArgument> arguments_;
};

}  // namespace outblas
