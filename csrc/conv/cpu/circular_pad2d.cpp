#include <algorithm>
#include <vector>

#include "conv/checks.h"

namespace ella {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements a thread writes at least

// Planes of one height and width, any strides.
template <class T>
struct Planes {
  const T* data;
  int64_t C, n, c, h, w;  // channels, strides

  explicit Planes(const Tensor& t)
      : data(t.const_data_ptr<T>()), C(t.size(1)), n(t.stride(0)), c(t.stride(1)), h(t.stride(2)), w(t.stride(3)) {}

  const T* row(int64_t plane, int64_t at) const { return data + plane / C * n + plane % C * c + at * h; }
};

// `out` begins `pad` elements before the `size` that are there: what is around them repeats them, however often.
template <class T>
void repeat_around(T* out, int64_t size, int64_t pad) {
  for (int64_t i = pad - 1; i >= 0; --i) out[i] = out[i + size];
  for (int64_t i = pad + size; i < size + 2 * pad; ++i) out[i] = out[i - size];
}

// The place among `size` of what `pad` before them, less a move back, has moved to `padded`.
int64_t unpadded(int64_t padded, int64_t pad, int64_t size) { return ((padded - pad) % size + size) % size; }

// f(plane, up, left) for all planes, with how far each is moved before it is padded.
template <class F>
void each_plane(const char* op, const CircularPadSizes& s, const std::optional<Tensor>& index, const F& f) {
  const int64_t size = std::max(s.padded_h() * s.padded_w(), int64_t{1});
  const std::vector<int64_t> components = index ? polyphase_components(op, *index) : std::vector<int64_t>();
  torch::stable::parallel_for(0, s.N * s.C, std::max(kGrain / size, int64_t{1}), [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) {
      const int64_t component = index ? components[plane / s.C] : 0;
      f(plane, component & 1, component >> 1);
    }
  });
}

Tensor circular_pad2d(const Tensor& x, int64_t pad_h, int64_t pad_w, const std::optional<Tensor>& index) {
  const CircularPadSizes s = check_circular_pad2d(x, pad_h, pad_w, index);
  const int64_t padded_h = s.padded_h(), padded_w = s.padded_w();
  Tensor result = empty_of(x, {s.N, s.C, padded_h, padded_w});
  ELLA_DISPATCH_FLOATING(x.scalar_type(), "circular_pad2d", [&] {
    const Planes<scalar_t> from(x);
    scalar_t* const images = result.mutable_data_ptr<scalar_t>();
    each_plane("circular_pad2d", s, index, [&](int64_t plane, int64_t up, int64_t left) {
      scalar_t* const out = images + plane * padded_h * padded_w;
      for (int64_t h = 0; h < s.H; ++h) {
        const scalar_t* const row = from.row(plane, (h + up) % s.H);
        scalar_t* const interior = out + (pad_h + h) * padded_w + pad_w;
        for (int64_t w = left; w < s.W; ++w) interior[w - left] = row[w * from.w];
        if (left && s.W) interior[s.W - 1] = row[0];
        repeat_around(interior - pad_w, s.W, pad_w);
      }
      repeat_around(out, s.H * padded_w, pad_h * padded_w);
    });
  });
  return result;
}

Tensor circular_fold2d(const Tensor& grad, int64_t pad_h, int64_t pad_w, const std::optional<Tensor>& index) {
  const CircularPadSizes s = check_circular_fold2d(grad, pad_h, pad_w, index);
  const int64_t padded_h = s.padded_h(), padded_w = s.padded_w();
  Tensor result = empty_of(grad, {s.N, s.C, s.H, s.W});
  ELLA_DISPATCH_FLOATING(grad.scalar_type(), "circular_fold2d", [&] {
    const Planes<scalar_t> from(grad);
    scalar_t* const images = result.mutable_data_ptr<scalar_t>();
    each_plane("circular_fold2d", s, index, [&](int64_t plane, int64_t up, int64_t left) {
      const int64_t first = s.W ? unpadded(0, pad_w - left, s.W) : 0;  // where a row's first element is added
      scalar_t* const out = images + plane * s.H * s.W;
      std::fill_n(out, s.H * s.W, scalar_t(0));
      for (int64_t h = 0; h < padded_h; ++h) {
        const scalar_t* const row = from.row(plane, h);
        scalar_t* const sums = out + unpadded(h, pad_h - up, s.H) * s.W;
        for (int64_t w = 0, to = first; w < padded_w; to = 0) {
          const int64_t end = std::min(w + s.W - to, padded_w);
          for (; w < end; ++w, ++to) sums[to] += row[w * from.w];
        }
      }
    });
  });
  return result;
}

ELLA_REGISTER(CPU, m) {
  m.impl("circular_pad2d", TORCH_BOX(&circular_pad2d));
  m.impl("circular_fold2d", TORCH_BOX(&circular_fold2d));
}

}  // namespace
}  // namespace ella
