// The code path that launches are told to take: of the library under test, not of the package.
#pragma once

#include "common/cuda_path.h"

// Called through ctypes; false where the text is not a path.
extern "C" __attribute__((used)) inline bool cusim_set_path(const char* text) {
  try {
    ella::CudaPathSetting::instance().set(text);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}
