// Every op of the library: its schema and what it computes. The implementations are csrc/<family>/cpu/<op>.cpp
// and csrc/<family>/cuda/<op>.cu.
// All tensors are float32 or float64 (indices int64), of one dtype unless said otherwise and one device; any strides unless
// said otherwise; any size may be zero. Symbols as in docs/method.md: N data, C and D channels, X and Y positions in and out, G
// blocks of a factor. allow_tf32: CUDA's tensor cores may round float32 numbers to TF32 before they multiply them; else, and on
// the CPU, products are as accurate as float32's.
#include "common/stable.h"

STABLE_TORCH_LIBRARY(ELLA_LIBRARY, m) {
  // y[n,d,y] = sum_c weight_out[d,c,y] (sum_x weight_in[d,c,x] x[n,c,x] + bias_in[d]) + bias_out[y]; x (N,C,X),
  // weight_in (D,C,X), weight_out (D,C,Y), bias_in (D,), bias_out (Y,) -> contiguous (N,D,Y)
  m.def(
      "factored_linear(Tensor x, Tensor weight_in, Tensor weight_out, Tensor? bias_in, Tensor? bias_out, "
      "bool allow_tf32=False) -> Tensor");

  // Gradients of x, weight_in, weight_out, bias_in, bias_out for grad (N,D,Y), contiguous; one not asked for has shape (0,).
  m.def(
      "factored_linear_backward(Tensor grad, Tensor x, Tensor weight_in, Tensor weight_out, Tensor? bias_in, bool grad_x, "
      "bool grad_weight_in, bool grad_weight_out, bool grad_bias_in, bool grad_bias_out, bool allow_tf32=False) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");

  // Both, with the (N,D,C) sums over x, in an order of the kernels' own, kept in between where they are no more than x has
  // elements; else, and on CUDA for float64 and many images, intermediate is empty and they are computed again.
  m.def(
      "factored_linear_keeping(Tensor x, Tensor weight_in, Tensor weight_out, Tensor? bias_in, Tensor? bias_out, "
      "bool allow_tf32=False) -> (Tensor, Tensor)");
  m.def(
      "factored_linear_backward_keeping(Tensor grad, Tensor x, Tensor weight_in, Tensor weight_out, Tensor? bias_in, "
      "Tensor intermediate, bool grad_x, bool grad_weight_in, bool grad_weight_out, bool grad_bias_in, bool grad_bias_out, "
      "bool allow_tf32=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");

  // factor[g] += alpha rows[:,g]^T rows[:,g]; factor contiguous (G,d,d), rows (N,G,d). Keeps a symmetric factor symmetric. A
  // float64 factor takes float32 rows too: short sums of products in float32, summed in float64. Rows may also be bfloat16 or
  // float16, which are multiplied as float32.
  m.def("kron_accumulate_(Tensor(a!) factor, Tensor rows, float alpha, bool allow_tf32=False) -> ()");

  // factor += alpha sum a a^T over the patches a of x (N,C,H,W) at every output position of a convolution; factor contiguous
  // (C kh kw, C kh kw) in the order of torch.nn.functional.unfold. Outside the image: wrapped if circular, else zeros. Types as
  // for kron_accumulate_.
  m.def(
      "conv_kron_accumulate_(Tensor(a!) factor, Tensor x, int[2] kernel_size, int[2] stride, int[2] padding, "
      "int[2] dilation, bool circular, float alpha, bool allow_tf32=False) -> ()");

  // The same for several factors, in fewer launches on CUDA; `geometries` has kernel_size, stride, padding, dilation and
  // circular of each. As the same sums one after the other, to the bit; what no factor has may change in between.
  m.def("kron_accumulate_many_(Tensor(a!)[] factors, Tensor[] rows, float[] alphas, bool allow_tf32=False) -> ()");
  m.def(
      "conv_kron_accumulate_many_(Tensor(a!)[] factors, Tensor[] xs, int[] geometries, float[] alphas, bool "
      "allow_tf32=False) -> ()");

  // sum_{g,i,j} log(eigenvalues_in[g,i] eigenvalues_out[g,j] + precision), (G,a), (G,b) or (1,b), () -> ()
  m.def("kron_logdet(Tensor eigenvalues_in, Tensor eigenvalues_out, Tensor precision) -> Tensor");

  // Its partial derivatives, in the shapes of the three inputs.
  m.def("kron_logdet_gradient(Tensor eigenvalues_in, Tensor eigenvalues_out, Tensor precision) -> (Tensor, Tensor, Tensor)");

  // Its Hessian times (v_in, v_out, v_precision), in the shapes of the three inputs.
  m.def(
      "kron_logdet_hvp(Tensor eigenvalues_in, Tensor eigenvalues_out, Tensor precision, Tensor v_in, Tensor v_out, "
      "Tensor v_precision) -> (Tensor, Tensor, Tensor)");

  // Eigenvalues of symmetric matrices, of which the lower triangles are read, of several sizes: sets (G,d,d) float64,
  // contiguous, d <= 1024 on CUDA, which are sums of ranks[s] outer products with a relative rounding error of errors[s]; both
  // are empty where that is unknown -> (V,), one matrix's after the other, each ascending; NaN where a matrix has numbers that
  // are not finite. Its CPU kernel is in Python: torch's LAPACK.
  m.def("symmetric_eigenvalues(Tensor[] sets, int[] ranks, float[] errors) -> Tensor");

  // The spectra of B tensors in one array: eigenvalues (E,), and tiles (T,5) int64, contiguous, each a tensor b, the first row
  // and the rows, the first column and the columns; rows and columns are eigenvalues, their products l m those of tensor b.
  // Tiles starts[b] .. starts[b+1] are tensor b's, starts (B+1,) int64. With q = exp(log_scale - log_precision[b]) l m over
  // tensor b:
  //   value ()        sum_b sum log(1 + q) + exp(log_precision[b]) square_norms[b]
  //   slope (B,)      its derivatives in log_precision, exp(log_precision[b]) square_norms[b] - effective[b]
  //   effective (B,)  sum q / (1 + q)
  m.def(
      "kron_evidence(Tensor eigenvalues, Tensor tiles, Tensor starts, Tensor square_norms, Tensor log_precision, "
      "Tensor log_scale) -> (Tensor, Tensor, Tensor)");

  // The derivative of effective[b] in log_ratio[b] = log_scale - log_precision[b], sum q / (1 + q)^2 over tensor b -> (B,)
  m.def("kron_evidence_bend(Tensor eigenvalues, Tensor tiles, Tensor starts, Tensor log_ratio) -> Tensor");

  // variance[n,k,l] += sum_{g,i,j} M[n,k,g,i,j] M[n,l,g,i,j] / (eigenvalues_in[g,i] eigenvalues_out[g,j] + precision), or the
  // diagonal l = k alone, with M[n,k,g,i,j] = sum_t inputs[n,t,g,i] outputs[k,n,t,g,j]; variance contiguous (N,K,K) or (N,K),
  // inputs (N,T,G,a), outputs (K,N,T,G,b), or without inputs (K,N,G,a,b), M itself; eigenvalues_in (G,a), eigenvalues_out (G,b)
  // or (1,b) and precision () float64. Beside a float64 variance, inputs and outputs may both be float32. Its CPU kernel is in
  // Python: products of tiles by torch.
  m.def(
      "kron_variance_(Tensor(a!) variance, Tensor outputs, Tensor? inputs, Tensor eigenvalues_in, Tensor eigenvalues_out, "
      "Tensor precision) -> ()");

  // out[m,a] = sum_x x[m,x] E[a,x], E[a,x] = exp(-|u[x] - v[a]|^2 / 2); x (M,X), u (X,P) and v (A,P) float64 whatever x's
  // type -> contiguous (M,A). E is symmetric in u and v: with them exchanged this is the transposed map.
  m.def("gaussian_project(Tensor x, Tensor u, Tensor v) -> Tensor");

  // Its derivative in (u, v) along (du, dv), all float64.
  m.def("gaussian_project_tangent(Tensor x, Tensor u, Tensor v, Tensor du, Tensor dv) -> Tensor");

  // The gradient in (u, v) of sum(grad * gaussian_project(x, u, v)), grad (M,A) -> (X,P) and (A,P), float64.
  m.def("gaussian_project_gradient(Tensor grad, Tensor x, Tensor u, Tensor v) -> (Tensor, Tensor)");

  // The Hessian in (u, v) of the same sum times (du, dv) -> (X,P) and (A,P), float64.
  m.def("gaussian_project_hvp(Tensor grad, Tensor x, Tensor u, Tensor v, Tensor du, Tensor dv) -> (Tensor, Tensor)");

  // out[n,s,c,i,j] = x[n,c] at the coordinates to which maps[n,s] takes pixel (i,j): bilinear, zeros outside; x (N,C,H,W), maps
  // (N,S,2,3), or (1,S,2,3) for all images, rows of affine matrices in normalised coordinates, -1 and 1 the centres of a side's
  // first and last pixels -> contiguous (N,S,C,H,W). With a direction, shaped as maps, its derivative in maps along that.
  m.def("affine_copies(Tensor x, Tensor maps, Tensor? direction) -> Tensor");

  // The gradients of x and maps of sum(grad * affine_copies(x, maps, direction)), grad (N,S,C,H,W) -> contiguous (N,C,H,W) and
  // (M,S,2,3); one not asked for has shape (0,).
  m.def(
      "affine_copies_backward(Tensor grad, Tensor x, Tensor maps, Tensor? direction, bool grad_x, bool grad_maps) "
      "-> (Tensor, Tensor)");

  // out[n,h] = sum_s act(sum_d bank[s,h,d] x[n,d] + bias[h]) / S; x (N,D), bank (S,H,D) with S > 0, bias (H,), activation 0
  // z, 1 max(z,0), 2 tanh(z), 3 exp(-z^2/2) -> contiguous (N,H). With `keep`, of ReLU on the CPU, bits too: whether the slope
  // of each of the N S H is 1, an uint8 tensor (S,H,B) of 256 / (8 itemsize) bytes for every 256 bytes of numbers, rounded
  // up; else that is empty.
  m.def(
      "averaged_filters(Tensor x, Tensor bank, Tensor? bias, int activation, bool keep, bool allow_tf32=False) "
      "-> (Tensor, Tensor)");

  // The gradients of x, bank and bias of sum(grad * out), grad (N,H), contiguous; one not asked for has shape (0,). `kept` are
  // the bits, or empty.
  m.def(
      "averaged_filters_backward(Tensor grad, Tensor x, Tensor bank, Tensor? bias, Tensor? kept, int activation, bool grad_x, "
      "bool grad_bank, bool grad_bias, bool allow_tf32=False) -> (Tensor, Tensor, Tensor)");

  // Of the components x[:, :, (i&1)::2, (i>>1)::2], i = 0..3, each image's own one with the largest l_norm (1, 2 or inf), the
  // first of equals; x (N,C,H,W), H and W even -> contiguous (N,C,H/2,W/2) and the index i (N,).
  m.def("polyphase_pool(Tensor x, float norm) -> (Tensor, Tensor)");

  // The components named by index (N,), and the transpose of that map: grad (N,C,h,w) -> (N,C,2h,2w), zeros elsewhere.
  m.def("polyphase_select(Tensor x, Tensor index) -> Tensor");
  m.def("polyphase_scatter(Tensor grad, Tensor index) -> Tensor");

  // An image with circular padding with pad_h more of its rows above and below and pad_w more of its columns left and right,
  // and the transpose of that map: x (N,C,H,W) -> contiguous (N,C,H+2pad_h,W+2pad_w), and back. Any padding, however often it
  // goes around. With index (N,), image n is moved up by index[n] & 1 and to the left by index[n] >> 1 before it is padded.
  m.def("circular_pad2d(Tensor x, int pad_h, int pad_w, Tensor? index) -> Tensor");
  m.def("circular_fold2d(Tensor grad, int pad_h, int pad_w, Tensor? index) -> Tensor");

  // 'Same' circular convolution, stride 1: y[n,d,h,w] = sum_{c,i,j} weight[d,c,i,j] x[n,c,(h+i-kh/2) mod H,(w+j-kw/2) mod W]
  // + bias[d]; x (N,C,H,W), weight (D,C,kh,kw), kh and kw odd, bias (D,) -> contiguous (N,D,H,W). CPU only: on CUDA Python
  // calls cuDNN through torch.
  m.def("circular_conv2d(Tensor x, Tensor weight, Tensor? bias) -> Tensor");

  // The gradient of its weight for grad (N,D,H,W) -> contiguous (D,C,kh,kw). CPU only.
  m.def("circular_conv2d_weight_grad(Tensor grad, Tensor x, int kernel_h, int kernel_w) -> Tensor");

  // polyphase_pool of circular_conv2d: x (N,C,H,W), H and W even -> contiguous (N,D,H/2,W/2), index (N,). CPU only: on CUDA
  // Python calls the two.
  m.def("circular_conv2d_pool(Tensor x, Tensor weight, Tensor? bias, float norm) -> (Tensor, Tensor)");

  // circular_conv2d of polyphase_scatter(x, index) without bias: x (N,C,h,w), index (N,), weight (D,C,kh,kw)
  // with kh and kw at least 3 -> contiguous (N,D,2h,2w). CPU only.
  m.def("circular_conv2d_scattered(Tensor x, Tensor index, Tensor weight) -> Tensor");

  // circular_conv2d_weight_grad of polyphase_scatter(grad, index): grad (N,D,H/2,W/2), index (N,), x (N,C,H,W)
  // -> contiguous (D,C,kh,kw). CPU only.
  m.def("circular_conv2d_scattered_weight_grad(Tensor grad, Tensor index, Tensor x, int kernel_h, int kernel_w) -> Tensor");
}
