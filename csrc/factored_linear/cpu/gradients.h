// F-FC, backward: all five gradients.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "factored_linear/cpu/arguments.h"

namespace ella {

// z and dz exist for some images and output channels at a time: first every input channel makes its z, then every output
// channel its dz and dV, then every input channel its dU and dx. What a task writes is nobody else's and no sum is cut between
// tasks, so that no result depends on the number of threads.
//
// All threads take these steps together, so that g is read once for all input channels. With few positions there is little to
// read and little to compute for each element of z and dz, which are better where they were written: there a thread takes all
// steps for some input channels, and their z and dz stay in its second-level cache.
template <class T>
class FactoredBackward {
 public:
  FactoredBackward(const FactoredLinearSizes& s, const FactoredLinearWanted& wanted, const Tensor& grad, const Tensor& x,
                   const Tensor& weight_in, const Tensor& weight_out, const std::optional<Tensor>& bias_in, const T* kept)
      : k_(kernels<T>()),
        s_(s),
        wanted_(wanted),
        blocks_(ceil_divide(s.N, k_.width)),
        apart_(s.X + s.Y <= kFewPositions && s.C >= kManyChannels),
        groups_(apart_ ? std::max(ceil_divide(s.C, kTileChannels), kManyChannels / kMin) : 1),
        chunk_(outputs_at_once()),
        parts_(apart_ ? 1 : std::min(ceil_divide(kTasks, chunk_), std::max(s.C / kMin, int64_t(1)))),
        intermediate_(s, x, weight_in, bias_in),
        g_(grad),
        x_(x),
        u_(weight_in),
        v_(weight_out),
        along_g_(along_rows(k_, s.Y, s.C, v_, g_)),
        dx_lanes_(in_lanes(k_, s.X, u_)),
        kept_(kept),
        dx_panels_(wanted.x && !dx_lanes_ && chunk_ < s.D ? max_blocks() * s.C * s.X * k_.width : 0),
        in_sums_(groups_ * parts_ * s.D),
        out_sums_(s.D * s.Y) {}

  void run(const Tensor& dx, const Tensor& du, const Tensor& dv, const Tensor& dbias_in, const Tensor& dbias_out) const {
    in_sums_.zero(0, groups_ * parts_ * s_.D);
    out_sums_.zero(0, s_.D * s_.Y);
    const Outputs out{dx.mutable_data_ptr<T>(), du.mutable_data_ptr<T>(), dv.mutable_data_ptr<T>()};
    if (apart_) {
      torch::stable::parallel_for(0, groups_, 1, [&](int64_t begin, int64_t end) {
        const Intermediates room(*this, ceil_divide(s_.C, groups_));
        Scratch scratch;
        for (int64_t group = begin; group < end; ++group) {
          const int64_t c0 = s_.C * group / groups_;
          all_images(group, c0, s_.C * (group + 1) / groups_ - c0, room, out, [&](int64_t tasks, const auto& f) {
            for (int64_t i = 0; i < tasks; ++i) f(i, scratch);
          });
        }
      });
    } else {
      all_images(0, 0, s_.C, Intermediates(*this, s_.C), out, [&](int64_t tasks, const auto& f) {
        torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
          Scratch scratch;
          for (int64_t i = begin; i < end; ++i) f(i, scratch);
        });
      });
    }
    if (wanted_.bias_in) add_sums(groups_ * parts_, s_.D, in_sums_.data(), dbias_in);
    if (wanted_.bias_out) add_sums(s_.D, s_.Y, out_sums_.data(), dbias_out);
  }

 private:
  static constexpr int64_t kTileChannels = 20;  // input channels of a thread that takes all steps for them
  static constexpr int64_t kTasks = 16;         // at least, where the sizes allow it
  static constexpr int64_t kMin = 5;            // channels of a task: fewer leave too much of a register tile empty
  static constexpr int64_t kFewPositions = 40;  // of x and y together
  static constexpr int64_t kManyChannels = 8 * kMin;
  static constexpr int64_t kPacking = 8;     // register tiles that read a panel, from which on it is packed
  static constexpr int64_t kFewColumns = 4;  // of a weight's gradient, which are sums along rows
  static constexpr int64_t kBlocks = 16;     // of images at a time, whose sums are added one after the other: to bound rounding

  struct Outputs {
    T *dx, *du, *dv;
  };

  // Some input channels, some blocks of images, and where their intermediates are, in rows of `intermediate_row`.
  struct Group {
    int64_t index, c0, channels, first, blocks;
    T* z;         // [block][output channel of the chunk][input channel][lane]
    T* dz;        // [block][input channel][output channel of the chunk][lane]
    T* x_panels;  // [block][input channel][position][lane], for all chunks; or null
  };

  struct Intermediates {
    Intermediates(const FactoredBackward& op, int64_t channels)
        : z(op.computes_z() ? op.max_blocks() * op.chunk_ * intermediate_row(op.k_, channels) : 0),
          dz(op.intermediate_gradient() ? op.max_blocks() * channels * intermediate_row(op.k_, op.chunk_) : 0),
          x_panels(op.apart_ && op.computes_z() ? op.max_blocks() * channels * op.intermediate_.panel_size() : 0) {}
    Buffer<T> z, dz, x_panels;
  };

  // Room that a thread's tasks use one after the other.
  class Scratch {
   public:
    T* panel(int64_t size) { return room(panel_, size); }  // of x, g or U
    T* rows(int64_t size) { return room(rows_, size); }    // of a weight's gradient
    T* sums(int64_t size) { return room(sums_, size); }    // of the images after the first kBlocks blocks

   private:
    T* room(std::optional<std::pair<Buffer<T>, int64_t>>& buffer, int64_t size) {
      if (!buffer || buffer->second < size) buffer.emplace(size, size);
      return buffer->first.data();
    }
    std::optional<std::pair<Buffer<T>, int64_t>> panel_, rows_, sums_;
  };

  // `each` calls a function of the task and a scratch for so many tasks.
  template <class Each>
  void all_images(int64_t index, int64_t c0, int64_t channels, const Intermediates& room, const Outputs& out,
                  const Each& each) const {
    for (int64_t first = 0; first < blocks_; first += kBlocks) {
      const int64_t blocks = std::min(kBlocks, blocks_ - first);
      steps({index, c0, channels, first, blocks, room.z.data(), room.dz.data(), apart_ ? room.x_panels.data() : nullptr}, out,
            each);
    }
  }

  template <class Each>
  void steps(const Group& group, const Outputs& out, const Each& each) const {
    // Few input channels: their work is shared out too, dU by output channels and dx by images.
    const int64_t pieces = apart_ ? 1 : ceil_divide(kTasks, std::max(s_.C, int64_t(1)));
    for (int64_t d0 = 0; d0 < s_.D; d0 += chunk_) {
      const int64_t rows = std::min(chunk_, s_.D - d0), of_u = std::min(pieces, ceil_divide(rows, k_.rows)),
                    of_x = std::min(pieces, group.blocks), both = of_u + of_x;
      if (computes_z()) {
        each(group.blocks * group.channels, [&](int64_t task, Scratch& scratch) {
          intermediate(group, d0, rows, group.first + task / group.channels, task % group.channels, scratch);
        });
      }
      each(rows * parts_,
           [&](int64_t task, Scratch& scratch) { outer_gradients(group, d0, task / parts_, task % parts_, out, scratch); });
      if (!wanted_.x && !wanted_.weight_in) continue;
      each(group.channels * both, [&](int64_t task, Scratch& scratch) {
        const int64_t c = task / both, i = task % both, j = i - of_u;
        if (i < of_u && wanted_.weight_in) {
          inner_weight(group, d0, rows * i / of_u, rows * (i + 1) / of_u, c, out.du, scratch);
        } else if (i >= of_u && wanted_.x) {
          input(group, d0, rows, c, group.blocks * j / of_x, group.blocks * (j + 1) / of_x, out.dx, scratch);
        }
      });
    }
  }

  // Output channels whose dz, and z, is there at a time: what fits in the cache, or as much as twice the larger one of x and g,
  // or 4 MiB of floats.
  int64_t outputs_at_once() const {
    constexpr int64_t kTile = 1 << 16, kLittle = 1 << 20;
    const int64_t n = std::min(s_.N, kBlocks * k_.width), one = max_blocks() * k_.width * ceil_divide(s_.C, groups_);
    const int64_t room = apart_ ? kTile : std::max({kLittle, 2 * n * s_.C * s_.X, 2 * n * s_.D * s_.Y});
    return balanced_group(s_.D, std::max(room / std::max(one, int64_t(1)) / k_.rows * k_.rows, k_.rows));
  }

  static void add_sums(int64_t parts, int64_t count, const double* sums, const Tensor& out) {
    T* target = out.mutable_data_ptr<T>();
    for (int64_t j = 0; j < count; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < parts; ++i) sum += sums[i * count + j];
      target[j] = static_cast<T>(sum);
    }
  }

  bool intermediate_gradient() const { return wanted_.x || wanted_.weight_in || wanted_.bias_in; }
  bool computes_z() const { return wanted_.weight_out && kept_ == nullptr; }
  int64_t max_blocks() const { return std::min(kBlocks, blocks_); }
  int64_t images(int64_t block) const { return std::min(k_.width, s_.N - block * k_.width); }

  // z of a block of images, for output channel d0 + i from a group's channel c on: kept for all, or this chunk's.
  const T* z(const Group& group, int64_t block, int64_t d0, int64_t i, int64_t c) const {
    return kept_ ? kept_ + (block * s_.D + d0 + i) * intermediate_row(k_, s_.C) + (group.c0 + c) * k_.width
                 : group.z + ((block - group.first) * chunk_ + i) * intermediate_row(k_, group.channels) + c * k_.width;
  }

  T* dz(const Group& group, int64_t block, int64_t c, int64_t i) const {
    return group.dz + ((block - group.first) * group.channels + c) * intermediate_row(k_, chunk_) + i * k_.width;
  }

  // z of a chunk of output channels and one input channel
  void intermediate(const Group& group, int64_t d0, int64_t rows, int64_t block, int64_t c, Scratch& scratch) const {
    const int64_t size = intermediate_.panel_size(), z_row = intermediate_row(k_, group.channels);
    T* const panel =
        group.x_panels ? group.x_panels + ((block - group.first) * group.channels + c) * size : scratch.panel(size);
    intermediate_.compute(block * k_.width, images(block), d0, rows, group.c0 + c, group.x_panels == nullptr || d0 == 0, panel,
                          group.z + (block - group.first) * chunk_ * z_row + c * k_.width, z_row);
  }

  // dz, dV and the biases' sums of output channel d0 + i and one part of the group's channels
  void outer_gradients(const Group& group, int64_t d0, int64_t i, int64_t part, const Outputs& out, Scratch& scratch) const {
    const int64_t W = k_.width, d = d0 + i, first = group.channels * part / parts_, c0 = group.c0 + first,
                  channels = group.channels * (part + 1) / parts_ - first;
    double* const in_sum = in_sums_.data() + (group.index * parts_ + part) * s_.D + d;
    double* const out_sums = wanted_.bias_out && group.index + part == 0 ? out_sums_.data() + d * s_.Y : nullptr;
    for (int64_t block = group.first; block < group.first + group.blocks; ++block) {
      const int64_t n0 = block * W, n = images(block);
      T* panel = nullptr;
      if (along_g_) {
        if (out_sums) image_sums(n, g_.at(n0, d), scratch.panel(W), out_sums);
      } else if (intermediate_gradient() || out_sums) {
        panel = scratch.panel(s_.Y * W);
        k_.pack(n, s_.Y, g_.at(n0, d), g_.s0, g_.s2, panel);
        if (out_sums) k_.lane_sums(s_.Y, n, panel, W, out_sums, 1);
      }
      if (intermediate_gradient()) {
        T* const target = dz(group, block, first, i);
        const int64_t dz_row = intermediate_row(k_, chunk_);
        if (along_g_) {
          fill_rows(k_, channels, n, static_cast<const T*>(nullptr), 0, target, dz_row);
          k_.row_products(channels, n, s_.Y, v_.at(d, c0), v_.s1, g_.at(n0, d), g_.s0, target, dz_row);
        } else {
          k_.product(channels, n, s_.Y, v_.at(d, c0), v_.s1, v_.s2, panel, W, nullptr, 0, 0, target, dz_row, false, false);
          clear_lanes(k_, channels, n, target, dz_row);
        }
        if (wanted_.bias_in) k_.lane_sums(channels, n, target, dz_row, in_sum, 0);
      }
      if (wanted_.weight_out) {
        weight_gradient(channels, block, s_.Y, z(group, block, d0, i, first), W, g_.at(n0, d), g_.s0, g_.s2, panel,
                        out.dv + (d * s_.C + c0) * s_.Y, s_.Y, scratch);
      }
    }
  }

  // sums[y] += sum_image g[image, y]
  void image_sums(int64_t n, const T* g, T* part, double* sums) const {
    const T one = 1;
    for (int64_t j = 0; j < s_.Y; j += k_.width) {
      const int64_t lanes = std::min(k_.width, s_.Y - j);
      k_.product(1, lanes, n, &one, 0, 0, g + j, g_.s0, nullptr, 0, 0, part, k_.width, false, false);
      for (int64_t lane = 0; lane < lanes; ++lane) sums[j + lane] += static_cast<double>(part[lane]);
    }
  }

  // dU[d, c, :] of output channels d0 + begin .. d0 + end and the group's channel c
  void inner_weight(const Group& group, int64_t d0, int64_t begin, int64_t end, int64_t c, T* du, Scratch& scratch) const {
    const int64_t channel = group.c0 + c;
    for (int64_t block = group.first; block < group.first + group.blocks; ++block) {
      weight_gradient(end - begin, block, s_.X, dz(group, block, c, begin), k_.width, x_.at(block * k_.width, channel), x_.s0,
                      x_.s2, nullptr, du + ((d0 + begin) * s_.C + channel) * s_.X, s_.C * s_.X, scratch);
    }
  }

  // dx of some blocks of images and the group's channel c, of which `rows` output channels from d0 on are a part
  void input(const Group& group, int64_t d0, int64_t rows, int64_t c, int64_t begin, int64_t end, T* dx,
             Scratch& scratch) const {
    const int64_t W = k_.width, channel = group.c0 + c;
    const auto target = [&](int64_t block) { return dx + (block * W * s_.C + channel) * s_.X; };
    for (int64_t j = 0; j < s_.X && dx_lanes_; j += W) {
      const int64_t lanes = std::min(W, s_.X - j);
      T* const panel = scratch.panel(rows * W);
      k_.pack(lanes, rows, u_.at(d0, channel) + j, 1, u_.s0, panel);
      for (int64_t block = group.first + begin; block < group.first + end; ++block) {
        k_.product(images(block), lanes, rows, dz(group, block, c, 0), 1, W, panel, W, nullptr, 0, 0, target(block) + j,
                   s_.C * s_.X, d0 > 0, false);
      }
    }
    for (int64_t block = group.first + begin; block < group.first + end && !dx_lanes_; ++block) {
      T* const panel =
          chunk_ < s_.D ? dx_panels_.data() + ((block - group.first) * s_.C + channel) * s_.X * W : scratch.panel(s_.X * W);
      k_.product(s_.X, images(block), rows, u_.at(d0, channel), u_.s2, u_.s0, dz(group, block, c, 0), W, nullptr, 0, 0, panel,
                 W, d0 > 0, false);
      if (d0 + rows == s_.D) k_.unpack(images(block), s_.X, panel, target(block), s_.C * s_.X);
    }
  }

  // A block's part of out[i, j] = sum_image a[i][image] source[image, j], j < columns. Few columns are dot products over the
  // images, which need them as a panel (`packed`, if there is one already); many are a product over the images with the columns
  // in the lanes.
  void weight_gradient(int64_t rows, int64_t block, int64_t columns, const T* a, int64_t a_row, const T* source,
                       int64_t image_stride, int64_t column_stride, const T* packed, T* out, int64_t out_row,
                       Scratch& scratch) const {
    const int64_t W = k_.width, n = images(block);
    const bool direct = block < kBlocks, add = block % kBlocks != 0;  // all_images begins anew every kBlocks
    T* const sums = direct ? out : scratch.sums(rows * columns);
    const int64_t sums_row = direct ? out_row : columns;
    if (columns <= kFewColumns && columns < k_.vector) {
      if (packed == nullptr) {
        T* const panel = scratch.rows(columns * W);
        k_.pack(n, columns, source, image_stride, column_stride, panel);
        packed = panel;
      }
      for (int64_t i = 0; i < rows && !add; ++i) std::fill_n(sums + i * sums_row, columns, T(0));
      const int64_t count = ceil_divide(n, k_.vector) * k_.vector;
      if (columns == 1 && sums_row == 1) {
        k_.row_products(1, rows, count, packed, W, a, a_row, sums, 0);
      } else {
        k_.row_products(rows, columns, count, a, a_row, packed, W, sums, sums_row);
      }
    } else {
      for (int64_t j = 0; j < columns; j += W) {
        const int64_t lanes = std::min(W, columns - j);
        const T* b = source + j * column_stride;
        int64_t b_row = image_stride;
        // As they lie in memory, its rows often share a few lines of the cache.
        const int64_t tiles = ceil_divide(rows, k_.rows) * ceil_divide(lanes, k_.lanes);
        if (column_stride != 1 || lanes % k_.vector != 0 || tiles >= kPacking) {
          T* const panel = scratch.rows(n * W);
          k_.pack(lanes, n, b, column_stride, image_stride, panel);
          b = panel;
          b_row = W;
        }
        k_.product(rows, lanes, n, a, a_row, 1, b, b_row, nullptr, 0, 0, sums + j, sums_row, add, true);
      }
    }
    if (!direct && (block % kBlocks == kBlocks - 1 || block == blocks_ - 1)) {
      adders<T, T>().rows(rows, columns, 1, sums, columns, out, out_row);
    }
  }

  const Kernels<T>& k_;
  const FactoredLinearSizes s_;
  const FactoredLinearWanted wanted_;
  const int64_t blocks_;  // of images
  const bool apart_;      // a thread takes all steps for a group of input channels
  const int64_t groups_;  // of these; one otherwise
  const int64_t chunk_;   // output channels whose dz, and z, is there at a time
  const int64_t parts_;   // of a group's channels, where output channels are few
  const Intermediate<T> intermediate_;
  const Array3<T> g_, x_, u_, v_;
  const bool along_g_;         // the sums over positions of g are taken along its rows
  const bool dx_lanes_;        // lanes of dx are positions
  const T* const kept_;        // z of all images, or null
  const Buffer<T> dx_panels_;  // [block][input channel][position][lane], where dx is a sum over chunks
  const Buffer<double> in_sums_, out_sums_;
};

}  // namespace ella
