// target += alpha sum_k row_k row_k^T for rows that are packed block by block: the core of kron_accumulate_ and
// conv_kron_accumulate_. Only the upper
// triangle is computed; every tile of the sum is added to the target and, transposed, to its mirror image.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/buffer.h"
#include "cpu/simd/kernels.h"

namespace ella {

// torch's parallel_for costs about as much as a small block here, even where there is nothing to share out.
template <class F>
void parallel_tasks(int64_t tasks, const F& f) {
  if (tasks == 1) {
    f(0, 1);
  } else {
    torch::stable::parallel_for(0, tasks, 1, f);
  }
}

// The arithmetic on packed rows. The upper triangle of a factor is a list of tiles, panel by panel: square groups of them come
// one after the other, so that those of a group, which share their panels, find them in the second-level cache.
template <class T>
class Tiles {
 public:
  explicit Tiles(int64_t d) : k_(kernels<T>()), d_(d), panels_(ceil_divide(d, k_.width)) {
    for (int64_t right = 0; right < panels_; right += kGroup) {
      for (int64_t left = 0; left <= right; left += kGroup) {
        for (int64_t r = right; r < std::min(right + kGroup, panels_); ++r) {
          for (int64_t l = left; l <= std::min(left + kGroup - 1, r); ++l) tiles_.push_back({l, r});
        }
        group_ends_.push_back(count());
      }
    }
  }

  static constexpr int64_t kGroup = 4;   // panels a side: 4 + 4 of kRows rows are 512 KiB
  static constexpr int64_t kRows = 256;  // rows for which the tiles of a group are done before the next rows

  int64_t panels() const { return panels_; }
  int64_t count() const { return static_cast<int64_t>(tiles_.size()); }
  int64_t tile_size() const { return k_.width * k_.width; }
  int64_t columns(int64_t panel) const { return std::min(k_.width, d_ - panel * k_.width); }

  // The end of the group that tile `begin` is of, or `end` if that comes first.
  int64_t group_end(int64_t begin, int64_t end) const {
    return std::min(*std::upper_bound(group_ends_.begin(), group_ends_.end(), begin), end);
  }

  // sums[i, j] of tiles begin..end, one after the other, for i <= j: the products of `rows` rows. Panels lie `panel` elements
  // apart.
  void products(int64_t begin, int64_t end, int64_t rows, const T* packed, int64_t panel, T* sums) const {
    for (int64_t k0 = 0; k0 < rows; k0 += kRows) {
      const int64_t count = std::min(kRows, rows - k0);
      for (int64_t tile = begin; tile < end; ++tile) {
        some_products(tile, count, packed + k0 * k_.width, panel, sums + (tile - begin) * tile_size(), k0 > 0);
      }
    }
  }

  // The same with sums of kRows rows in T, `once` being a tile of them, which is zero, and the rest in a wider type.
  template <class Wide>
  void products(int64_t begin, int64_t end, int64_t rows, const T* packed, int64_t panel, T* once, Wide* sums) const {
    const int64_t W = k_.width;
    std::fill_n(sums, (end - begin) * tile_size(), Wide(0));
    for (int64_t k0 = 0; k0 < rows; k0 += kRows) {
      const int64_t count = std::min(kRows, rows - k0);
      for (int64_t tile = begin; tile < end; ++tile) {
        some_products(tile, count, packed + k0 * W, panel, once, false);
        adders<T, Wide>().rows(columns(tiles_[tile].left), columns(tiles_[tile].right), 1, once, W,
                               sums + (tile - begin) * tile_size(), W);
      }
    }
  }

  // The first row and the first column of a tile.
  std::pair<int64_t, int64_t> corner(int64_t tile) const {
    return {tiles_[tile].left * k_.width, tiles_[tile].right * k_.width};
  }

  // Asks for what `add` will change, a tile's products before it is wanted: rows of a target lie too far apart for the hardware
  // to foresee them.
  template <class Total>
  void prefetch(int64_t tile, const Total* target) const {
    constexpr int64_t kLine = 64 / sizeof(Total);
    const int64_t W = k_.width;
    const auto [left, right] = tiles_[tile];
    for (const auto& [down, across] : {std::pair(left, right), std::pair(right, left)}) {
      const Total* corner = target + down * W * d_ + across * W;
      for (int64_t i = 0; i < columns(down); ++i) {
        for (int64_t j = 0; j < columns(across); j += kLine) __builtin_prefetch(corner + i * d_ + j, 1, 2);
      }
      if (left == right) break;
    }
  }

  // Adds alpha times the sums of tiles begin..end to the target and, transposed, to their mirror images.
  template <class Sum, class Total>
  void add(int64_t begin, int64_t end, Total alpha, const Sum* sums, Total* target) const {
    const int64_t W = k_.width;
    const Adders<Sum, Total>& adder = adders<Sum, Total>();
    for (int64_t tile = begin; tile < end; ++tile, sums += tile_size()) {
      const auto [left, right] = tiles_[tile];
      Total* upper = target + left * W * d_ + right * W;
      if (left == right) {
        adder.mirrored(columns(left), alpha, sums, W, upper, d_);
      } else {
        adder.both(columns(left), columns(right), alpha, sums, W, upper, target + right * W * d_ + left * W, d_);
      }
    }
  }

 private:
  static constexpr int64_t kShort = 64;  // of a triangle: 16 KiB, which the rows of its register tiles share

  struct Tile {
    int64_t left, right;
  };

  // A tile's products of up to kRows rows.
  void some_products(int64_t tile, int64_t count, const T* packed, int64_t panel, T* sum, bool add) const {
    const int64_t W = k_.width;
    const auto [left, right] = tiles_[tile];
    const T *a = packed + left * panel, *b = packed + right * panel;
    if (left == right) {
      triangle(columns(left), count, a, sum, add);
    } else {
      k_.product(columns(left), columns(right), count, a, 1, W, b, W, nullptr, 0, 0, sum, W, add, false);
    }
  }

  // Vectors left of the diagonal are skipped.
  void triangle(int64_t m, int64_t rows, const T* panel, T* sum, bool add) const {
    const int64_t W = k_.width, last = (m - 1) / k_.vector * k_.vector;
    for (int64_t k0 = 0; k0 < rows; k0 += kShort, panel += kShort * W) {
      const int64_t count = std::min(kShort, rows - k0);
      for (int64_t i = 0; i < m;) {
        const int64_t first = i / k_.vector * k_.vector, here = first == last ? m - i : std::min(k_.rows, m - i);
        k_.product(here, m - first, count, panel + i, 1, W, panel + first, W, nullptr, 0, 0, sum + i * W + first, W,
                   add || k0 > 0, false);
        i += here;
      }
    }
  }

  const Kernels<T>& k_;
  const int64_t d_, panels_;
  std::vector<Tile> tiles_;
  std::vector<int64_t> group_ends_;
};

// Factors on all threads, as many at a time as there is room for their rows.
template <class T>
class Gram {
 public:
  Gram(int64_t d, int64_t count, int64_t factors = 1)
      : k_(kernels<T>()),
        d_(d),
        tiles_(d),
        rows_(std::min({count, kLongest, std::max(kPacked / (tiles_.panels() * k_.width) / kStep * kStep, kStep)})),
        factors_(std::min(factors, std::max(kPacked / (tiles_.panels() * k_.width * rows_), int64_t(1)))),
        by_runs_(factors == 1 && tiles_.count() < kEnough && count > rows_),
        packed_(by_runs_ ? 0 : factors_ * tiles_.panels() * k_.width * rows_) {}

  // `pack(factor, first, n, k0, count, panel)` writes columns first..first+n of rows k0..k0+count. Called from several threads.
  // A target wider than T gets sums of Tiles::kRows rows in T, added up in its own type.
  template <class Total, class Pack>
  void accumulate(Total* target, int64_t factors, int64_t count, double alpha, const Pack& pack) const {
    for_sums<Total>(
        factors, count, pack, [&](int64_t factor, int64_t tile) { tiles_.prefetch(tile, target + factor * d_ * d_); },
        [&](int64_t factor, int64_t begin, int64_t end, const auto* sums) {
          tiles_.add(begin, end, static_cast<Total>(alpha), sums, target + factor * d_ * d_);
        });
  }

  // `take(factor, begin, end, sums)` gets the sums of tiles begin..end, one after the other, as Tiles::products writes them,
  // once for some rows of each: in Sum, or in T where they are of no more than Tiles::kRows rows. Before it, `expect(factor,
  // tile)` is called where that is worth it. Called from several threads, for a tile from one at a time.
  template <class Sum, class Pack, class Expect, class Take>
  void for_sums(int64_t factors, int64_t count, const Pack& pack, const Expect& expect, const Take& take) const {
    if (by_runs_) {
      for_sums_of_runs<Sum>(count, pack, take);
      return;
    }
    for (int64_t f0 = 0; f0 < factors; f0 += factors_) {
      for (int64_t k0 = 0; k0 < count; k0 += rows_) {
        some_rows<Sum>(f0, std::min(factors_, factors - f0), k0, std::min(rows_, count - k0), pack, expect, take);
      }
    }
  }

  const Tiles<T>& tiles() const { return tiles_; }

 private:
  static constexpr int64_t kEnough = 16;  // tiles for all threads; else each has rows of its own
  static constexpr int64_t kRuns = 16;    // of rows, which threads share out
  // Elements packed at once: every pass reads and writes the whole target, 2 d^2 elements, against d^2 multiply-adds a row.
  static constexpr int64_t kPacked = 8 * 1024 * 1024 / static_cast<int64_t>(sizeof(T));
  static constexpr int64_t kStep = Tiles<T>::kRows;
  static constexpr int64_t kLongest = 4096;  // rows summed before the target is touched, by 64: to bound rounding

  template <class Sum, class Pack, class Expect, class Take>
  void some_rows(int64_t f0, int64_t factors, int64_t k0, int64_t rows, const Pack& pack, const Expect& expect,
                 const Take& take) const {
    const int64_t W = k_.width, panels = tiles_.panels(), panel = W * rows_, size = tiles_.tile_size(), count = tiles_.count();
    parallel_tasks(factors * panels, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        pack(f0 + p / panels, p % panels * W, tiles_.columns(p % panels), k0, rows, packed_.data() + p * panel);
      }
    });
    parallel_tasks(factors * count, [&](int64_t begin, int64_t end) {
      // Few rows: the target is most of the traffic, and a tile is added right after its products, for which it was fetched.
      const bool few = rows <= Tiles<T>::kRows;
      const int64_t max_count = few ? 1 : std::min(std::min(end - begin, count), Tiles<T>::kGroup * Tiles<T>::kGroup);
      const bool widens = sizeof(Sum) > sizeof(T) && !few;
      const Buffer<T> sums((widens ? 1 : max_count) * size);
      const Buffer<Sum> wide(widens ? max_count * size : 0);
      if (widens) sums.zero(0, size);
      while (begin < end) {
        const int64_t factor = begin / count, first = begin - factor * count, left = end - factor * count;
        const int64_t stop = few ? first + 1 : tiles_.group_end(first, std::min(left, count));
        if (few) expect(f0 + factor, first);
        const T* const packed = packed_.data() + factor * panels * panel;
        if (widens) {
          tiles_.products(first, stop, rows, packed, panel, sums.data(), wide.data());
          take(f0 + factor, first, stop, static_cast<const Sum*>(wide.data()));
        } else {
          tiles_.products(first, stop, rows, packed, panel, sums.data());
          take(f0 + factor, first, stop, static_cast<const T*>(sums.data()));
        }
        begin += stop - first;
      }
    });
  }

  // Of a factor of few tiles: runs of rows on all threads, and their sums in order, for the same numbers with any number of
  // threads.
  template <class Sum, class Pack, class Take>
  void for_sums_of_runs(int64_t count, const Pack& pack, const Take& take) const {
    const int64_t W = k_.width, panels = tiles_.panels(), panel = W * rows_, size = tiles_.tile_size(), tiles = tiles_.count();
    const int64_t runs = ceil_divide(count, rows_);
    const Buffer<Sum> sums(std::min(runs, kRuns) * tiles * size);
    for (int64_t r0 = 0; r0 < runs; r0 += kRuns) {
      const int64_t at_once = std::min(kRuns, runs - r0);
      parallel_tasks(at_once, [&](int64_t begin, int64_t end) {
        const Buffer<T> packed(panels * panel), once(sizeof(Sum) > sizeof(T) ? size : 0);
        if constexpr (sizeof(Sum) > sizeof(T)) once.zero(0, size);
        for (int64_t run = begin; run < end; ++run) {
          const int64_t k0 = (r0 + run) * rows_, rows = std::min(rows_, count - k0);
          for (int64_t p = 0; p < panels; ++p) pack(0, p * W, tiles_.columns(p), k0, rows, packed.data() + p * panel);
          Sum* const own = sums.data() + run * tiles * size;
          if constexpr (sizeof(Sum) > sizeof(T)) {
            tiles_.products(0, tiles, rows, packed.data(), panel, once.data(), own);
          } else {
            tiles_.products(0, tiles, rows, packed.data(), panel, own);
          }
        }
      });
      for (int64_t run = 0; run < at_once; ++run) take(0, 0, tiles, static_cast<const Sum*>(sums.data() + run * tiles * size));
    }
  }

  const Kernels<T>& k_;
  const int64_t d_;
  const Tiles<T> tiles_;
  const int64_t rows_, factors_;
  const bool by_runs_;  // all threads have rows of one factor
  const Buffer<T> packed_;
};

}  // namespace ella
