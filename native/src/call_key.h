// What a plan depends on, as words that are compared and hashed: the properties of a call's tensors,
// and the state of torch in the calling thread.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <bit>
#include <cstdint>

namespace outblas {

// The function that a call came through. Calls of different functions have plans of their own, since
// their operands lie differently.
enum class Kind : int64_t {
  matmul = 0,  // a, b
  linear = 1,  // x, weight (N, K), bias, residual
  aten_mm = 5,
  aten_bmm = 6,
  aten_addmm = 7,  // a, b, c
};

// The tensors of a call. Those that it does not have are null. `b` of `Kind::linear` is the weight
// as it is stored.
struct Operands {
  const at::Tensor* a = nullptr;
  const at::Tensor* b = nullptr;
  const at::Tensor* c = nullptr;
  const at::Tensor* bias = nullptr;
  const at::Tensor* residual = nullptr;
  const at::Tensor* out = nullptr;  // what the call writes; null where it allocates its result
};

// What a call asks for besides its tensors.
struct Options {
  Kind kind;
  bool batch_invariant = false;
  bool recorded = false;  // whether autograd records the call
  int64_t activation = 0;  // a number for each name, 0 for none
  double alpha = 1;
  double beta = 0;
};

// The SMs that the call of this thread leaves free; 0 without a limit. A limit exceeds the setting of
// torch, which is that of the process.
inline thread_local int64_t sm_limit = 0;

class CallKey {
 public:
  CallKey(const Operands& operands, const Options& options) {
    const auto local = c10::impl::tls_local_dispatch_key_set();
    const auto& context = at::globalContext();
    add(static_cast<int64_t>(options.kind) | int64_t{options.batch_invariant} << 8 |
        int64_t{options.recorded} << 9 | int64_t{uses_tf32(*operands.a)} << 10 |
        options.activation << 16);
    add(sm_limit != 0 ? sm_limit : context._SMCarveout_EXPERIMENTAL().value_or(0));
    add(std::bit_cast<int64_t>(options.alpha));
    add(std::bit_cast<int64_t>(options.beta));
    add(operands.a, local, LINE);
    add(operands.b, local, LINE);
    add(operands.c, local, GRANULE);
    add(operands.bias, local, GRANULE);
    add(operands.residual, local, GRANULE);
    add(operands.out, local, GRANULE);
  }

  uint64_t hash() const {
    uint64_t found = 0;
    for (const int64_t word : words_) {
      found = (std::rotl(found, 23) ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15u;
    }
    return found ^ found >> 32;
  }

  bool operator==(const CallKey& other) const { return words_ == other.words_; }

 private:
  static constexpr int64_t LINE = 128;  // bytes of a cache line: where operands begin within one
  static constexpr int64_t GRANULE = 16;  // bytes that are loaded or stored at once

  static bool uses_tf32(const at::Tensor& a) {
    return a.scalar_type() == at::kFloat &&
        at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
        at::Float32Precision::TF32;
  }

  void add(int64_t word) { words_.push_back(word); }

  void add(const at::Tensor* given, const c10::impl::LocalDispatchKeySet& local, int64_t line) {
    if (given == nullptr) {
      add(0);
      return;
    }
    const c10::TensorImpl& t = *given->unsafeGetTensorImpl();
    // What dispatch would see: modes, autocast, transforms and tracing are keys of the thread.
    const auto keys = (t.key_set() | local.included_) - local.excluded_;
    // Reading the address of a lazy clone for reading alone leaves it lazy.
    const auto address = reinterpret_cast<int64_t>(given->const_data_ptr());
    const auto device = t.device();
    add(static_cast<int64_t>(keys.raw_repr()));
    add(1 | static_cast<int64_t>(given->scalar_type()) << 1 |
        static_cast<int64_t>(device.type()) << 9 |
        static_cast<int64_t>(static_cast<uint8_t>(device.index())) << 17 | t.dim() << 25 |
        (address & (line - 1)) << 32 | int64_t{address != 0} << 40);
    for (const int64_t size : t.sizes()) {
      add(size);
    }
    for (const int64_t stride : t.strides()) {
      add(stride);
    }
  }

  c10::SmallVector<int64_t, 48> words_;
};

}  // namespace outblas
