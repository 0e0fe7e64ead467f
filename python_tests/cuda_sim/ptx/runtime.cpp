// The few functions of the CUDA runtime and of libtorch_cuda that this library's host code calls, on host memory, with a
// callback in place of a device: code that nvcc compiled runs on a machine without one.
//
// Linked with --wrap for the functions that would look for libtorch_cuda.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstring>
#include <map>
#include <string>

#include "../../../csrc/common/cuda_path.h"

namespace {

// A launch: the kernel's mangled name, blocks, threads, bytes of dynamic shared memory, pointers to the arguments; true if it
// ran without a fault.
using Launch = bool (*)(const char*, unsigned, unsigned, size_t, void**);
// A tensor whose address was asked for: it, the axes, sizes and strides, bytes of an element, whether to write there.
using AddressAsked = void (*)(const void*, int64_t, const int64_t*, const int64_t*, int64_t, bool);

Launch on_launch = nullptr;
AddressAsked on_address = nullptr;
int multiprocessors = 2, cache_bytes = 8192, major = 8, minor = 0;
cudaError_t last_error = cudaSuccess;

struct Configuration {
  dim3 blocks, threads;
  size_t shared_bytes;
  void* stream;
};
thread_local Configuration pushed;

std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> value;
  return value;
}

std::map<const void*, size_t>& granted() {  // bytes of dynamic shared memory that a kernel was allowed
  static std::map<const void*, size_t> value;
  return value;
}

void tell(AtenTensorHandle tensor, const void* address, bool writable) {
  int64_t axes = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;
  aoti_torch_get_dim(tensor, &axes);
  aoti_torch_get_sizes(tensor, &sizes);
  aoti_torch_get_strides(tensor, &strides);
  aoti_torch_get_dtype(tensor, &dtype);
  on_address(address, axes, sizes, strides, static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)), writable);
}

}  // namespace

extern "C" {

void ella_ptx_attach(Launch launch, AddressAsked address_asked, int processors, int cache, int capability) {
  on_launch = launch, on_address = address_asked, multiprocessors = processors, cache_bytes = cache;
  major = capability / 10, minor = capability % 10;
}

void ella_ptx_set_path(const char* text) { ella::CudaPathSetting::instance().set(text); }

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*, uint3*, dim3*, dim3*, int*) {
  names()[host] = device;
}

unsigned __cudaPushCallConfiguration(dim3 blocks, dim3 threads, size_t shared_bytes, CUstream_st* stream) {
  pushed = {blocks, threads, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* blocks, dim3* threads, size_t* shared_bytes, void* stream) {
  *blocks = pushed.blocks, *threads = pushed.threads, *shared_bytes = pushed.shared_bytes;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments, size_t shared_bytes,
                             cudaStream_t) {
  const auto allowed = granted().find(kernel);
  const size_t most = allowed == granted().end() ? 48 * 1024 : allowed->second;
  const bool shaped = blocks.y * blocks.z * threads.y * threads.z == 1 && blocks.x > 0 && threads.x > 0 && threads.x <= 1024;
  if (!shaped || shared_bytes > most) return last_error = cudaErrorInvalidValue;
  const bool ran = on_launch && on_launch(names().at(kernel).c_str(), blocks.x, threads.x, shared_bytes, arguments);
  return last_error = ran ? cudaSuccess : cudaErrorLaunchFailure;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 blocks, dim3 threads, void** arguments, size_t shared_bytes,
                               cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, threads, arguments, shared_bytes, stream);
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value) {
  const int most = (major >= 9 ? 227 : 163) * 1024;  // of compute capability 9.0 and of 8.0
  if (which != cudaFuncAttributeMaxDynamicSharedMemorySize || value > most) return last_error = cudaErrorInvalidValue;
  granted()[kernel] = value;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrMultiProcessorCount:
      return *value = multiprocessors, cudaSuccess;
    case cudaDevAttrL2CacheSize:
      return *value = cache_bytes, cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      return *value = major, cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      return *value = minor, cudaSuccess;
    default:
      return last_error = cudaErrorInvalidValue;
  }
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "the kernel stopped with a fault" : "invalid value";
}

int ella_ptx_current_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
int __wrap_aoti_torch_create_device_guard(int32_t, void** guard) {
  *guard = nullptr;
  return 0;
}
int __wrap_aoti_torch_delete_device_guard(void*) { return 0; }

AOTITorchError __real_aoti_torch_get_data_ptr(AtenTensorHandle, void**);
AOTITorchError __wrap_aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** address) {
  const AOTITorchError error = __real_aoti_torch_get_data_ptr(tensor, address);
  if (error == 0) tell(tensor, *address, true);
  return error;
}
AOTITorchError __real_torch_get_mutable_data_ptr(AtenTensorHandle, void**);
AOTITorchError __wrap_torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** address) {
  const AOTITorchError error = __real_torch_get_mutable_data_ptr(tensor, address);
  if (error == 0) tell(tensor, *address, true);
  return error;
}
AOTITorchError __real_torch_get_const_data_ptr(AtenTensorHandle, const void**);
AOTITorchError __wrap_torch_get_const_data_ptr(AtenTensorHandle tensor, const void** address) {
  const AOTITorchError error = __real_torch_get_const_data_ptr(tensor, address);
  if (error == 0) tell(tensor, *address, false);
  return error;
}

void* __wrap_dlopen(const char*, int) { return reinterpret_cast<void*>(1); }
void* __wrap_dlsym(void*, const char* name) {
  return std::strcmp(name, "aoti_torch_get_current_cuda_stream") ? nullptr : reinterpret_cast<void*>(ella_ptx_current_stream);
}
}
