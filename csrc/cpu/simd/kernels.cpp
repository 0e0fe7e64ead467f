// The choice among the sets of kernels.
#include "cpu/simd/kernels.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace ella {
namespace {

#if defined(ELLA_X86_KERNELS)
enum class Set { kBaseline, kAvx2, kAvx512 };

// torch's own variable to hold its kernels back holds these back too.
Set allowed_set() {
  const char* name = std::getenv("ATEN_CPU_CAPABILITY");
  if (name == nullptr) return Set::kAvx512;
  return std::strcmp(name, "default") == 0 ? Set::kBaseline : std::strcmp(name, "avx2") == 0 ? Set::kAvx2 : Set::kAvx512;
}

Set best_set() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Set::kBaseline;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Set::kAvx512 : Set::kAvx2;
}

Set running_set() {
  static const Set set = std::min(allowed_set(), best_set());
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
#elif defined(ELLA_NEON_KERNELS)
#define ELLA_CHOOSE(TABLE) return neon::TABLE
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
template <>
const Adders<float, float>& adders<float, float>() {
  ELLA_CHOOSE(add_floats);
}
template <>
const Adders<float, double>& adders<float, double>() {
  ELLA_CHOOSE(widen_floats);
}
template <>
const Adders<double, double>& adders<double, double>() {
  ELLA_CHOOSE(add_doubles);
}
const LogdetKernels& logdet_kernels() { ELLA_CHOOSE(logdet); }
const EvidenceKernels& evidence_kernels() { ELLA_CHOOSE(evidence); }

}  // namespace ella
