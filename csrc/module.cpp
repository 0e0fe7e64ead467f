// The Python module ella_cuda._C: importing it registers the ops (static initialisers of the other sources); by itself it
// only tells how it was built.
#undef TORCH_TARGET_VERSION  // the pybind11 that ships inside torch refuses to be compiled against the stable ABI
#include <pybind11/pybind11.h>

#include <string>

#include "common/cuda_path.h"
#include "cpu/simd/kernels.h"
#include "ella_build_info.h"
#include "factored_linear/plan.h"

namespace py = pybind11;

namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

py::dict build_info() {
  py::dict info;
  info["version"] = ELLA_VERSION;
  info["cuda"] = ELLA_CUDA_VERSION;
  info["cuda_archs"] = ELLA_CUDA_ARCHS;
  info["compiler"] = compiler();
  info["torch_headers"] = ELLA_TORCH_HEADERS;
  info["cpu_kernels"] = ella::kernels<float>().name;
  info["summary"] = ELLA_BUILD_SUMMARY;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled ops of ella_cuda; importing it registers torch.ops.ella_cuda.";
  m.def("build_info", &build_info,
        "How this extension was built: version, cuda (version of the toolkit, \"\" if built without), cuda_archs, compiler,\n"
        "torch_headers (version of the torch whose headers were used), cpu_kernels (instruction set in use on this processor:\n"
        "baseline, avx2, avx512 or neon; held back by ATEN_CPU_CAPABILITY as torch's own kernels are), summary (one line).");
  m.def(
      "factored_linear_by_torch",
      [](int64_t N, int64_t C, int64_t X, int64_t D, int64_t Y, int64_t element_size, bool cuda) {
        return ella::factored_linear_by_torch({N, C, X, D, Y}, element_size, cuda);
      },
      "Whether factored_linear multiplies its weights out by torch (csrc/factored_linear/plan.h).");
  m.def("cuda_path", [] { return ella::CudaPathSetting::instance().text(); }, "The code path of CUDA launches, as it was set.");
  m.def(
      "set_cuda_path", [](const std::string& path) { ella::CudaPathSetting::instance().set(path); },
      "Fix the code path of CUDA launches for the process; \"\" leaves all to the launchers (csrc/common/cuda_path.h).");
}
