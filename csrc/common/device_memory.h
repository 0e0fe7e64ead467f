// Memory as kernels use it: shared memory cut into arrays, vector reads, asynchronous copies, strided views.
// Under the simulator SharedArray is a checked pointer (bounds, races, copies that have not arrived); under nvcc it is a
// plain one and everything here compiles to the instruction it names.
#pragma once

#include <cstdint>

#include "common/device.h"

namespace ella {

// Every shared array starts on a 16-byte boundary, for vector reads.
__host__ __device__ constexpr size_t shared_size(size_t bytes) { return (bytes + 15) / 16 * 16; }

#ifdef ELLA_SIMULATOR

template <class T>
using SharedArray = cusim::SharedArray<T>;
using SharedMemory = cusim::SharedMemory;
using cusim::copy_async;
using cusim::copy_async_commit;
using cusim::copy_async_vector;
using cusim::copy_async_wait;
using cusim::load_vector;
using cusim::store_pair;
using cusim::store_vector;
#define ELLA_SHARED_MEMORY(name) ::ella::SharedMemory name

#else

template <class T>
using SharedArray = T*;

// Hands out consecutive arrays of the block's dynamic shared memory; all threads ask for the same ones in the same order.
class SharedMemory {
 public:
  __device__ __forceinline__ explicit SharedMemory(unsigned char* begin) : next_(begin) {}

  template <class T>
  __device__ __forceinline__ SharedArray<T> array(int count) {
    T* const result = reinterpret_cast<T*>(next_);
    next_ += shared_size(count * sizeof(T));
    return result;
  }

 private:
  unsigned char* next_;
};

#define ELLA_SHARED_MEMORY(name)                                     \
  extern __shared__ __align__(16) unsigned char ella_shared_bytes[]; \
  ::ella::SharedMemory name(ella_shared_bytes)

// out[0..N) = from[0..N), 16 bytes an instruction; `from` lies on a 16-byte boundary.
template <int N>
__device__ __forceinline__ void load_vector(float (&out)[N], const float* from) {
  static_assert(N % 4 == 0, "float vectors come in fours");
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
  }
}

template <int N>
__device__ __forceinline__ void load_vector(double (&out)[N], const double* from) {
  static_assert(N % 2 == 0, "double vectors come in twos");
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const double2 v = *reinterpret_cast<const double2*>(from + i);
    out[i] = v.x, out[i + 1] = v.y;
  }
}

// Starts a copy of one element from global to shared memory without passing a register (LDGSTS); zero instead where not
// `valid`, and then `from` is never read, wherever it points. The element is there after a commit, a wait and, for the other
// threads, a barrier.
template <class T>
__device__ __forceinline__ void copy_async(T* to, const T* from, bool valid) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "cp.async.ca copies 4, 8 or 16 bytes");
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = valid ? static_cast<int>(sizeof(T)) : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(sizeof(T)), "r"(bytes)
               : "memory");
}

// The same for four neighbouring floats; both addresses lie on 16-byte boundaries.
__device__ __forceinline__ void copy_async_vector(float* to, const float* from, bool valid) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's newest groups are still under way.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// to[0..4) = values in global memory; `to` lies on a 16-byte boundary. As an instruction: nvcc takes a float4's store apart.
__device__ __forceinline__ void store_vector(float* to, const float (&values)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(values[0]), "f"(values[1]), "f"(values[2]),
               "f"(values[3])
               : "memory");
}

__device__ __forceinline__ void store_vector(double* to, const double (&values)[2]) {
  asm volatile("st.global.v2.f64 [%0], {%1, %2};" ::"l"(to), "d"(values[0]), "d"(values[1]) : "memory");
}

// The same for two; `to` lies on an 8-byte boundary.
__device__ __forceinline__ void store_pair(float* to, float first, float second) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(first), "f"(second) : "memory");
}

#endif

// A tensor of three axes read through its strides: expanded (stride 0), sliced and permuted ones cost nothing.
template <class T>
struct View3 {
  const T* data;
  int64_t stride0, stride1, stride2;

  __device__ __forceinline__ const T* at(int64_t i, int64_t j, int64_t k) const {
    return data + i * stride0 + j * stride1 + k * stride2;
  }
};

}  // namespace ella
