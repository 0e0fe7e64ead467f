// The kernels for whatever the compiler targets by itself, and the choice among the sets.
#define ELLA_SET baseline
#define ELLA_VECTOR_BYTES 16
#define ELLA_TILE_ROWS 4
#define ELLA_TILE_VECTORS 2
#include "kernels.inc"

namespace ella {
namespace {

#ifdef ELLA_X86_KERNELS
enum class Set { kBaseline, kAvx2, kAvx512 };

Set running_set() {
  static const Set set = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      return Set::kAvx512;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? Set::kAvx2 : Set::kBaseline;
  }();
  return set;
}
#define ELLA_CHOOSE(TABLE)  \
  switch (running_set()) {  \
    case Set::kAvx512:      \
      return avx512::TABLE; \
    case Set::kAvx2:        \
      return avx2::TABLE;   \
    case Set::kBaseline:    \
      break;                \
  }                         \
  return baseline::TABLE
#else
#define ELLA_CHOOSE(TABLE) return baseline::TABLE
#endif

}  // namespace

template <>
const Kernels<float>& kernels<float>() {
  ELLA_CHOOSE(floats);
}
template <>
const Kernels<double>& kernels<double>() {
  ELLA_CHOOSE(doubles);
}
const LogdetKernels& logdet_kernels() { ELLA_CHOOSE(logdet); }

}  // namespace ella
