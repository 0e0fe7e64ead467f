// Code paths of CUDA launches that a user may fix: one build then finds by halving which path gives a wrong result, and by a
// sweep which is fastest.
//
// A path is a list of KEY=VALUE, separated by commas; a key that is not named is the launcher's choice:
//   product=scalar|mma|wgmma       what multiplies: ordinary instructions, tensor cores by warp, by warpgroup
//   split=N                        blocks that share a sum (split-K), from 1 on
//   tile=N                         rows and columns of a block's results, where the kernel has such tiles
//   lags=yes|no                    whether conv_kron_accumulate_ sums products of images at each distance once:
//                                  "yes" is an error where it cannot be
//
// The process has one path, the environment's ELLA_CUDA_PATH until set_cuda_path. Launches read it; graphs that were captured
// keep the path they were captured with.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string>

#include "common/error.h"

namespace ella {

struct CudaPath {
  enum class Product { automatic, scalar, mma, wgmma };
  enum class Choice { automatic, yes, no };

  Product product = Product::automatic;
  Choice lags = Choice::automatic;
  int64_t split = 0;  // 0: automatic, as for tile
  int64_t tile = 0;
};

// Throws std::runtime_error that names the key, what it may be and what came.
inline CudaPath parse_cuda_path(const std::string& text) {
  CudaPath path;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = item.find('=');
    const std::string key = item.substr(0, equals), value = equals == std::string::npos ? "" : item.substr(equals + 1);
    const auto one_of = [&](auto names, auto values, auto& target) {
      std::string listed;
      for (size_t i = 0; i < names.size(); ++i) {
        if (value == names[i]) {
          target = values[i];
          return;
        }
        listed += (i ? ", " : "") + std::string(names[i]);
      }
      fail("ELLA_CUDA_PATH: ", key, " must be one of ", listed, ", got '", value, "'");
    };
    const auto count = [&](int64_t& target) {
      const bool digits = !value.empty() && value.size() < 10 && value.find_first_not_of("0123456789") == std::string::npos;
      target = digits ? std::stoll(value) : 0;
      ELLA_CHECK(target > 0, "ELLA_CUDA_PATH: ", key, " must be a whole number from 1 on, got '", value, "'");
    };
    using Product = CudaPath::Product;
    using Choice = CudaPath::Choice;
    const std::array<Choice, 2> choices{Choice::yes, Choice::no};
    if (key == "product") {
      one_of(std::array<const char*, 3>{"scalar", "mma", "wgmma"},
             std::array<Product, 3>{Product::scalar, Product::mma, Product::wgmma}, path.product);
    } else if (key == "lags") {
      one_of(std::array<const char*, 2>{"yes", "no"}, choices, path.lags);
    } else if (key == "split") {
      count(path.split);
    } else if (key == "tile") {
      count(path.tile);
    } else {
      fail("ELLA_CUDA_PATH: expected KEY=VALUE with a key of ", "product, split, tile, lags, separated by commas, got '", item,
           "'");
    }
  }
  return path;
}

class CudaPathSetting {
 public:
  static CudaPathSetting& instance() {
    static CudaPathSetting setting;
    return setting;
  }

  CudaPath get() {
    const std::lock_guard<std::mutex> lock(mutex_);
    read_environment();
    return path_;
  }

  std::string text() {
    const std::lock_guard<std::mutex> lock(mutex_);
    read_environment();
    return text_;
  }

  // What does not parse leaves the path as it is.
  void set(const std::string& text) {
    const CudaPath path = parse_cuda_path(text);
    const std::lock_guard<std::mutex> lock(mutex_);
    path_ = path, text_ = text, read_ = true;
  }

 private:
  void read_environment() {  // again at the next call where it does not parse
    if (read_) return;
    const char* const value = std::getenv("ELLA_CUDA_PATH");
    const std::string text = value == nullptr ? "" : value;
    path_ = parse_cuda_path(text);
    text_ = text, read_ = true;
  }

  std::mutex mutex_;
  bool read_ = false;
  CudaPath path_;
  std::string text_;
};

inline CudaPath cuda_path() { return CudaPathSetting::instance().get(); }

}  // namespace ella
