// What a CUDA source needs from its platform: the device and stream of a tensor, scratch memory, kernel launches.
// The kernels are compiled twice, by nvcc and, unmodified, by g++ for the CPU simulator of the test-suite
// (ELLA_SIMULATOR, python_tests/cuda_sim). Whatever differs between the two lives in this file, device_memory.h,
// tensor_core.h and warpgroup.h; a kernel source contains no <<<>>>, no inline assembly and no bare `extern __shared__`.
#pragma once

#include <array>
#include <cstdint>

#include "common/stable.h"

#ifndef ELLA_SIMULATOR
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#endif

namespace ella {

// Grids are one-dimensional everywhere: x goes to 2^31 - 1 blocks, y and z only to 65535.
constexpr int64_t kMaxBlocks = 2147483647;

// Dynamic shared memory that every architecture grants without being asked.
constexpr size_t kPlainSharedBytes = 48 * 1024;

template <class Integer>
__host__ __device__ constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// The largest index that kernels compute in 32 bits; tests set a smaller one, so that small shapes take both types.
#ifndef ELLA_MAX_INDEX_32
#define ELLA_MAX_INDEX_32 2147483647
#endif
constexpr int64_t kMaxIndex32 = ELLA_MAX_INDEX_32;

#ifdef ELLA_SIMULATOR

#define ELLA_WARPGROUPS  // kernels of warpgroup.h are there; else the build says so, for compute capability 9.0a

class Device {
 public:
  explicit Device(const Tensor&) {}
  // Few, so that the small shapes of the tests take the paths that split work over blocks.
  int64_t multiprocessors() const { return cusim::schedule().multiprocessors; }
  bool warpgroups() const { return cusim::schedule().warpgroups; }
  // Several in turn, so that tests share rows of tickets, have rows of their own and find none left.
  std::array<unsigned long long, 3> order() const {
    static unsigned long long calls = 0;
    return {calls++ % 5, 0, 0};
  }
};

#else

inline void check_cuda(cudaError_t error, const char* name) {
  ELLA_CHECK(error == cudaSuccess, "ella_cuda: ", name, ": ", cudaGetErrorString(error));
}

// Symbols of libtorch_cuda are looked up in the running process at first use: linking against them would stop this library
// from loading beside a CPU-only torch.
inline void* torch_cuda_symbol(const char* name) {
  static void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* const symbol = library ? dlsym(library, name) : nullptr;
  ELLA_CHECK(symbol, "ella_cuda: ", name, " not found: the installed torch was built without CUDA; install a CUDA build");
  return symbol;
}

// Makes the tensor's device the current one for its lifetime and knows that device's current stream.
class Device {
 public:
  explicit Device(const Tensor& tensor) : index_(tensor.get_device_index()), guard_(index_) {
    using GetStream = AOTITorchError (*)(int32_t, void**);
    static const GetStream get_stream = reinterpret_cast<GetStream>(torch_cuda_symbol("aoti_torch_get_current_cuda_stream"));
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(get_stream(index_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

  // What kernels have in common that run one after another: their stream, and the CUDA graph that it records, if any.
  std::array<unsigned long long, 3> order() const {
    unsigned long long stream = 0, graph = 0;
    cudaStreamCaptureStatus status;
    check_cuda(cudaStreamGetId(stream_, &stream), "stream");
    check_cuda(cudaStreamGetCaptureInfo(stream_, &status, &graph), "stream capture");
    return {stream, static_cast<unsigned long long>(status), graph};
  }

  int64_t multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }

  // Whether the device has the instructions of sm_90a, which no other architecture has.
  bool warpgroups() const {
    return attribute(cudaDevAttrComputeCapabilityMajor) == 9 && attribute(cudaDevAttrComputeCapabilityMinor) == 0;
  }

 private:
  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, index_), "device attribute");
    return value;
  }

  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

#endif

// Launches kernel<<<blocks, threads, shared_bytes>>> on the device's current stream; no blocks, no launch.
template <class... P, class... A>
void launch([[maybe_unused]] const Device& device, const char* name, void (*kernel)(P...), int64_t blocks, unsigned threads,
            size_t shared_bytes, A... arguments) {
  if (blocks == 0) return;
  ELLA_CHECK(blocks <= kMaxBlocks, "ella_cuda: ", name, ": ", blocks, " blocks exceed the grid limit ", kMaxBlocks);
#ifdef ELLA_SIMULATOR
  cusim::launch(name, kernel, static_cast<unsigned>(blocks), threads, shared_bytes, arguments...);
#else
  if (shared_bytes > kPlainSharedBytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), name);
  }
  // clang-format off
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, device.stream()>>>(static_cast<P>(arguments)...);
  // clang-format on
  check_cuda(cudaGetLastError(), name);
#endif
}

// Sets every byte of a tensor to zero, in the stream's order.
inline void clear([[maybe_unused]] const Device& device, [[maybe_unused]] const char* name, const Tensor& tensor) {
#ifdef ELLA_SIMULATOR
  ++cusim::counts().clears;
  std::memset(tensor.data_ptr(), 0, tensor.numel() * tensor.element_size());
#else
  check_cuda(cudaMemsetAsync(tensor.data_ptr(), 0, tensor.numel() * tensor.element_size(), device.stream()), name);
#endif
}

// Uninitialised memory. The simulator sets every byte, to NaN in floating point and -1 in integers, so that a result nobody
// wrote shows.
inline Tensor device_empty(const Tensor& like, std::initializer_list<int64_t> shape,
                           std::optional<ScalarType> dtype = std::nullopt) {
  Tensor result = empty_of(like, shape, dtype);
#ifdef ELLA_SIMULATOR
  cusim::poison(result.data_ptr(), result.numel() * result.element_size());
#endif
  return result;
}

}  // namespace ella
