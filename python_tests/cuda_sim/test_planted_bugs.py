"""The simulator notices: each kind of bug, planted in a copy of the real kernel sources, fails a run for its own reason.

All bugs are in one copy, each behind a condition of its own, so that a source is compiled once for all of its bugs. Each runs in a
process of its own, where that bug alone is there, in all orders of threads and blocks until it fails.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import simulator as build

pytestmark = pytest.mark.simulator

WRONG = "wrong result"


@dataclass(frozen=True)
class Bug:
    """`old` (`occurrence` of `count`) in csrc/`file` becomes `new`; running `source` fails and `says` why.

    In `new` the word BUG is 1 where the bug is there and else 0. Without that word, `old` and `new` are whole statements, one of
    which is run. `warpgroups`: on a device that has them.
    """

    name: str
    file: str
    old: str
    new: str
    source: str
    says: str
    count: int = 1
    occurrence: int = 0
    warpgroups: bool = False

    def plant(self, csrc: Path, number: int) -> None:
        """Makes this bug the one of that number, in sources where others may be planted already."""
        path = csrc / self.file
        pieces = path.read_text().split(self.old)
        assert len(pieces) == self.count + 1, (
            f"{self.file} has {len(pieces) - 1} of what should be replaced, not {self.count}"
        )
        there = f"::cusim::planted({number})"
        new, said = re.subn(r"\bBUG\b", there, self.new)
        if not said:
            assert re.search(r";( *//.*)?\n?$", self.old), f"{self.name}: no statement, and no BUG in what it becomes"
            new = f"if ({there}) {{\n{self.new}\n}} else {{\n{self.old}\n}}\n"
        head, tail = pieces[: self.occurrence + 1], pieces[self.occurrence + 1 :]
        path.write_text(self.old.join(head) + new + self.old.join(tail))


BUGS = [
    Bug(
        "no barrier between copying and multiplying",
        "cuda/slab_pipeline.cuh",
        "    __syncthreads();  // this slab is there for all, and all are done with the one whose stage is filled next\n",
        "",
        "kron_accumulate",
        "race on shared memory|nobody wrote|not waited for",
    ),
    Bug(
        "no barrier before the groups' sums are laid over the last slab",
        "kron/cuda/syrk_scalar.cuh",
        "    __syncthreads();  // all are done with the last slab, over which the groups' sums are laid\n",
        "",
        "kron_accumulate",
        "race on shared memory",
    ),
    Bug(
        "waits for one slab too few",
        "cuda/slab_pipeline.cuh",
        "copy_async_wait<Stages - 2>();",
        "copy_async_wait<Stages - 1>();",
        "kron_accumulate",
        "read of an asynchronous copy that was not waited for",
    ),
    Bug(
        "matrix fragment read from the wrong lane's columns",
        "cuda/tensor_fragments.cuh",
        "* Shape::kStride + first + 4 * g));",
        "* Shape::kStride + first + 4 * (g ^ BUG)));",
        "kron_accumulate",
        WRONG,
    ),
    Bug(
        "matrix fragments from different rows",
        "cuda/tensor_fragments.cuh",
        "const float columns[2] = {b[q][j], b[q + 1][j]};",
        "const float columns[2] = {b[q + BUG][j], b[q + 1 - BUG][j]};",
        "kron_accumulate",
        WRONG,
    ),
    Bug(
        "a small term of the split product is missing",
        "cuda/tensor_fragments.cuh",
        "    multiply_fragments(chain, a.big, b.small);\n",
        "",
        "kron_accumulate",
        WRONG,
    ),
    Bug(
        "sums that stay in the tensor cores and are cut again and again",
        "cuda/tensor_fragments.cuh",
        "  Results chain = {};\n",
        "  if (BUG) {\n"
        "    multiply_fragments(sum, a.small, b.big);\n    multiply_fragments(sum, a.big, b.small);\n"
        "    multiply_fragments(sum, a.big, b.big);\n    return;\n  }\n  Results chain = {};\n",
        "kron_accumulate",
        WRONG,
    ),
    Bug(
        "no barrier before the warps' sums are laid over the last slab",
        "kron/cuda/syrk_tensor.cuh",
        "    __syncthreads();  // all are done with the last slab\n",
        "",
        "kron_accumulate",
        "race on shared memory: .* after a read",
    ),
    Bug(
        "no barrier between a square of the shares' sums and its rows and columns",
        "kron/cuda/syrk_tile.cuh",
        "  __syncthreads();  // the square is there for all\n",
        "",
        "kron_accumulate",
        "race on shared memory: read after a write|nobody wrote",
    ),
    Bug(
        "columns split for products that are not made visible to them",
        "kron/cuda/syrk_warpgroup.cuh",
        "  writes_before_products();\n",
        "",
        "kron_accumulate",
        "written without making it visible to products",
        warpgroups=True,
    ),
    Bug(
        "products without a fence",
        "kron/cuda/syrk_warpgroup.cuh",
        "  warpgroup_fence();\n",
        "",
        "kron_accumulate",
        "a product without a fence before it",
        warpgroups=True,
    ),
    Bug(
        "no barrier between splitting columns and their products",
        "kron/cuda/syrk_warpgroup.cuh",
        "    copy_async_wait<Shape::kStages - 3>();\n    __syncthreads();\n",
        "    copy_async_wait<Shape::kStages - 3>();\n    if (!BUG) __syncthreads();\n",
        "kron_accumulate",
        "race on shared memory|nobody wrote|not waited for|visible to products",
        warpgroups=True,
    ),
    Bug(
        "waits for one slab too few before its columns are split",
        "kron/cuda/syrk_warpgroup.cuh",
        "copy_async_wait<Shape::kStages - 3>();",
        "copy_async_wait<Shape::kStages - 2>();",
        "kron_accumulate",
        "read of an asynchronous copy that was not waited for",
        warpgroups=True,
    ),
    Bug(
        "columns split over those that products read",
        "kron/cuda/syrk_warpgroup.cuh",
        "half ^= 1;",
        "half ^= 1 - BUG;",
        "kron_accumulate",
        "race on shared memory: .* after a read|race on shared memory: read after a write",
        warpgroups=True,
    ),
    Bug(
        "a slab copied over one that is read",
        "kron/cuda/syrk_warpgroup.cuh",
        "start_slab_ahead<Shape::kStages>(stage, ",
        "start_slab_ahead<Shape::kStages>(BUG ? next_stage<Shape::kStages>(stage) : stage, ",
        "kron_accumulate",
        "race on shared memory|not waited for",
        warpgroups=True,
    ),
    Bug(
        "sums taken of products that are under way",
        "kron/cuda/syrk_warpgroup.cuh",
        "    finish_products<1>(chain[1], sum[1]);\n",
        "    finish_products<2>(chain[1], sum[1]);\n",
        "kron_accumulate",
        WRONG,
        warpgroups=True,
    ),
    Bug(
        "a chain of products that goes on from the last one's sum",
        "kron/cuda/syrk_warpgroup.cuh",
        "step, step > 0);\n      warpgroup_multiply(",
        "step, BUG || step > 0);\n      warpgroup_multiply(",
        "kron_accumulate",
        WRONG,
        warpgroups=True,
    ),
    Bug(
        "a small term of a warpgroup's split product is missing",
        "kron/cuda/syrk_warpgroup.cuh",
        "      warpgroup_multiply(chain, rows.big[step], small, 2 * sixteen + step, true);\n",
        "",
        "kron_accumulate",
        WRONG,
        warpgroups=True,
    ),
    Bug(
        "rows read into registers of products under way",
        "kron/cuda/syrk_warpgroup.cuh",
        "    second.template read<COPY>(rows_operand + stage * Shape::kStage, 16);\n",
        "    first.template read<COPY>(rows_operand + stage * Shape::kStage, 16), second = first;\n",
        "kron_accumulate",
        "an operand of a product changed before the wait",
        warpgroups=True,
    ),
    Bug(
        "the columns' operand of a diagonal tile off the diagonal",
        "kron/cuda/syrk_warpgroup.cuh",
        "syrk_task.i0 == syrk_task.j0 ? 0 : Shape::kOperand",
        "BUG || syrk_task.i0 == syrk_task.j0 ? 0 : Shape::kOperand",
        "kron_accumulate",
        WRONG,
        warpgroups=True,
    ),
    Bug(
        "a tile laid over the last slab that is read",
        "kron/cuda/syrk_warpgroup.cuh",
        "  if (parts == nullptr) __syncthreads();  // all are done with the last slab, over which the tile is laid\n",
        "  if (!BUG && parts == nullptr) __syncthreads();\n",
        "kron_accumulate",
        "race on shared memory: .* after a read",
        warpgroups=True,
    ),
    Bug(
        "no barrier between a tile and its update of the factor",
        "kron/cuda/syrk_warpgroup.cuh",
        "  __syncthreads();  // the tile is there for all\n",
        "",
        "kron_accumulate",
        "race on shared memory|nobody wrote|not waited for",
        warpgroups=True,
    ),
    Bug(
        "a mirror image that is not mirrored",
        "kron/cuda/syrk_tile.cuh",
        "square[column * stride + row]",
        "square[BUG ? row * stride + column : column * stride + row]",
        "kron_accumulate",
        WRONG,
        warpgroups=True,
    ),
    Bug(
        "a unit of images copied over one that is read",
        "kron/cuda/lags.cuh",
        "    __syncthreads();  // all are done with the unit before\n",
        "",
        "conv_kron_accumulate",
        "race on shared memory",
    ),
    Bug(
        "a unit of images that is not waited for by all",
        "kron/cuda/lags.cuh",
        "    __syncthreads();  // the unit is there for all\n",
        "",
        "conv_kron_accumulate",
        "race on shared memory|nobody wrote|not waited for",
    ),
    Bug(
        "sums laid over images that are read",
        "kron/cuda/lags.cuh",
        "    __syncthreads();  // all are done with the last unit, over which the sums are laid\n",
        "",
        "conv_kron_accumulate",
        "race on shared memory: .* after a read",
    ),
    Bug(
        "positions beyond a row that count",
        "kron/cuda/lags.cuh",
        "w + p < s.W ? own[p] : T(0)",
        "BUG || w + p < s.W ? own[p] : T(0)",
        "conv_kron_accumulate",
        WRONG,
    ),
    Bug(
        "lags of two channels for those of the same two the other way round",
        "kron/cuda/lags.cuh",
        "c = other, other = swapped, down = -down",
        "c = BUG ? c : other, other = BUG ? other : swapped, down = -down",
        "conv_kron_accumulate",
        WRONG,
    ),
    Bug(
        "pieces not where the hardware looks for them",
        "common/warpgroup.h",
        "constexpr int swizzled_piece(int column, int piece) {\n  return column * kSwizzledDepth + (piece ^ column % 8) * 4;",
        "int swizzled_piece(int column, int piece) {\n  return column * kSwizzledDepth + (piece ^ column % (BUG ? 4 : 8)) * 4;",
        "kron_accumulate",
        WRONG,
        warpgroups=True,
    ),
    Bug(
        "waits for one copy group too few",
        "factored_linear/cuda/tiles.cuh",
        "copy_async_wait<0>();",
        "copy_async_wait<1>();",
        "factored_linear",
        "read of an asynchronous copy that was not waited for",
    ),
    Bug(
        "blocks of one gradient that take the places of another's",
        "factored_linear/cuda/fused.cuh",
        "weight_block(work.d_weight_out, block - work.d_weight_out.blocks.first,",
        "weight_block(work.d_weight_out, block - (BUG ? 0 : work.d_weight_out.blocks.first),",
        "factored_linear",
        "|".join([WRONG, "out of bounds", "nobody wrote"]),
    ),
    Bug(
        "shares of a gradient that are not added",
        "factored_linear/cuda/fused.cuh",
        "for (int64_t s = 1; s < work.splits; ++s)",
        "for (int64_t s = 1 + BUG; s < work.splits; ++s)",
        "factored_linear",
        WRONG,
    ),
    Bug(
        "gradient of shares that others add to at once",
        "factored_linear/cuda/fused.cuh",
        "work.out + split * (size.batches * size.columns * size.outputs)",
        "work.out + (BUG ? 0 : split) * (size.batches * size.columns * size.outputs)",
        "factored_linear",
        WRONG,
    ),
    Bug(
        "no barrier between one slab of a fused map and the next",
        "factored_linear/cuda/tiles.cuh",
        "    __syncthreads();  // this slab is there for all, and all are done with the last one and its partial sums\n",
        "",
        "factored_linear",
        "race on shared memory|nobody wrote|not waited for",
    ),
    Bug(
        "no barrier between a fused map's inner products and their use",
        "factored_linear/cuda/tiles.cuh",
        "  __syncthreads();  // the inner products are there for all\n",
        "",
        "factored_linear",
        "race on shared memory|nobody wrote",
    ),
    Bug(
        "a slab copied over one that a batched product reads",
        "cuda/slab_pipeline.cuh",
        "start(stage == 0 ? Stages - 1 : stage - 1);",
        "start(BUG ? stage : stage == 0 ? Stages - 1 : stage - 1);",
        "factored_linear",
        "race on shared memory|not waited for",
    ),
    Bug(
        "factors of a batched product from different places of the sum",
        "cuda/tensor_product.cuh",
        "return Swapped ? k % 4 * 4 + k / 4 : k;",
        "return Swapped && !BUG ? k % 4 * 4 + k / 4 : k;",
        "factored_linear",
        WRONG,
    ),
    Bug(
        "what lies behind the last place of a sum multiplied too",
        "cuda/tensor_product.cuh",
        "kKMajor ? 0 < left_ && line_or_k < lines_ : line_or_k < left_;",
        "BUG ? line_or_k < lines_ : kKMajor ? 0 < left_ && line_or_k < lines_ : line_or_k < left_;",
        "factored_linear",
        WRONG,
    ),
    Bug(
        "results of a batched product in the places of their neighbours",
        "cuda/tensor_fragments.cuh",
        "block[r][c] = sum[r / 2][c][r % 2 * 2 + half];",
        "block[r][c] = sum[r / 2][c][r % 2 * 2 + (BUG ? 1 - half : half)];",
        "factored_linear",
        WRONG,
    ),
    Bug(
        "splits of a product that the block of the last one adds, whether or not the others are there",
        "cuda/tensor_product.cuh",
        "if (!last_block(work.tickets + place.tile, flag, work.splits)) return false;",
        "if (BUG ? place.split != work.splits - 1 : !last_block(work.tickets + place.tile, flag, work.splits)) return false;",
        "factored_linear",
        WRONG,
    ),
    Bug(
        "splits of a product added in an order that depends on which block is last",
        "cuda/tensor_product.cuh",
        "  const float* from = parts;\n",
        "  const float* from = parts;\n"
        "  if (BUG && place.split == work.splits - 1) {\n"
        "    for (int v = 0; v < 8; ++v) load_vector(flat[v], from + (work.splits - 1) * Shape::kPart + v * kVector);\n"
        "    for (int other = work.splits - 2; other >= 0; --other) {\n"
        "      float part[8][4];\n"
        "      for (int v = 0; v < 8; ++v) load_vector(part[v], from + other * Shape::kPart + v * kVector);\n"
        "      for (int v = 0; v < 8; ++v) {\n"
        "        for (int c = 0; c < 4; ++c) flat[v][c] += part[v][c];\n"
        "      }\n"
        "    }\n"
        "    return true;\n"
        "  }\n",
        "factored_linear",
        "depends on the order of blocks",
    ),
    Bug(
        "a split of a product that is not added",
        "cuda/tensor_product.cuh",
        "for (int other = 1; other < work.splits; ++other)",
        "for (int other = 1 + BUG; other < work.splits; ++other)",
        "factored_linear",
        WRONG,
    ),
    Bug(
        "tickets of a product's tiles that start at what the memory held",
        "cuda/tensor_product.cuh",
        "    clear(device, name, *tickets_);\n",
        "",
        "factored_linear",
        WRONG,
    ),
    Bug(
        "splits of a product's depth that overlap where they do not come out even",
        "cuda/tensor_product.cuh",
        "(at.split * each + min(at.split, more))",
        "(at.split * each + (BUG ? 0 : min(at.split, more)))",
        "factored_linear",
        WRONG,
    ),
    Bug(
        "shuffle mask without the calling lane",
        "cuda/reduce.cuh",
        "__shfl_xor_sync(kFullWarp, value, step)",
        "__shfl_xor_sync(BUG ? 0x0000ffffu : kFullWarp, value, step)",
        "kron_logdet",
        "whose mask leaves it out",
    ),
    Bug(
        "shuffle after some lanes have left",
        "kron/cuda/kron_logdet.cu",
        "  double sum = 0, precision_sum = 0;\n",
        "  double sum = 0, precision_sum = 0;\n  if (BUG && row >= side.rows) return;\n",
        "kron_logdet",
        "names lane [0-9]+, which has exited",
    ),
    Bug(
        "tile of inverses overwritten while others read it",
        "kron/cuda/kron_variance.cu",
        "    for (int64_t i0 = 0; i0 < s.a; i0 += kRows) {\n      __syncthreads();\n",
        "    for (int64_t i0 = 0; i0 < s.a; i0 += kRows) {\n      if (!BUG) __syncthreads();\n",
        "kron_variance",
        "race on shared memory",
    ),
    Bug(
        "shared memory written out of bounds",
        "kron/cuda/kron_logdet.cu",
        "memory.array<double>(kThreads / kWarp)",
        "memory.array<double>(kThreads / kWarp - BUG)",
        "kron_logdet",
        "shared memory accessed out of bounds",
        count=2,
        occurrence=0,
    ),
    Bug(
        "threads race for one element",
        "cuda/reduce.cuh",
        "  if (lane == 0) scratch[warp] = value;\n",
        "  if (BUG || lane == 0) scratch[warp] = value;\n",
        "polyphase_pool",
        "race on shared memory: write after a write",
    ),
    Bug(
        "barrier that only half the block reaches",
        "cuda/reduce.cuh",
        " scratch[warp] = value;\n  __syncthreads();\n",
        " scratch[warp] = value;\n  if (!BUG || threadIdx.x < 128) __syncthreads();\n",
        "polyphase_pool",
        "divergent __syncthreads|deadlock",
    ),
    Bug(
        "launch that grants too little shared memory",
        "kron/cuda/kron_logdet.cu",
        "constexpr size_t kScratchBytes = shared_size(kThreads / kWarp * sizeof(double));",
        "#define kScratchBytes shared_size(kThreads / kWarp * (BUG ? sizeof(float) : sizeof(double)))",
        "kron_logdet",
        "shared arrays need 64 bytes, the launch grants 32",
    ),
    Bug(
        "the last transform's filters fetched before all are done with the one before",
        "filters/cuda/averaged_filters.cu",
        "__syncthreads();  // nobody reads the last slabs any more",
        "if (!BUG) __syncthreads();",
        "averaged_filters",
        "race on shared memory|not waited for",
    ),
    Bug(
        "blocks that have one transform more than others without it",
        "filters/cuda/averaged_filters.cu",
        "(split < more ? 1 : 0);",
        "(!BUG && split < more ? 1 : 0);",
        "averaged_filters",
        WRONG,
    ),
    Bug(
        "a filter's bias taken for its neighbour's",
        "filters/cuda/averaged_filters.cu",
        "? work.bias[column] : 0.0f;",
        "? work.bias[BUG ? h : column] : 0.0f;",
        "averaged_filters",
        WRONG,
    ),
    Bug(
        "slopes of the first images for all",
        "filters/cuda/averaged_filters.cu",
        "const int64_t n = at % N, h = at / N % H;",
        "const int64_t n = BUG ? 0 : at % N, h = at / N % H;",
        "averaged_filters",
        WRONG,
    ),
    Bug(
        "the gradient of images from the last transforms alone",
        "filters/cuda/averaged_filters.cu",
        "  total = first ? part :",
        "  total = first || BUG ? part :",
        "averaged_filters",
        WRONG,
    ),
    Bug(
        "a pixel's neighbours that look further than is thought",
        "affine/cuda/affine_copies.cu",
        "const double around = 1 + rounding;",
        "const double around = (BUG ? 0.5 : 1.0) + rounding;",
        "affine_copies",
        WRONG,
    ),
    Bug(
        "channels behind the first four that take the first's gradient",
        "affine/cuda/affine_copies.cu",
        "+ c0 * grad.c +",
        "+ (BUG ? 0 : c0) * grad.c +",
        "affine_copies",
        WRONG,
    ),
    Bug(
        "the first part of a copy's pixels alone",
        "affine/cuda/affine_copies.cu",
        "for (int64_t part = 0; part < parts; ++part, from",
        "for (int64_t part = 0; part < (BUG ? 1 : parts); ++part, from",
        "affine_copies",
        WRONG,
    ),
    Bug(
        "a side's end taken for the image's",
        "affine/cuda/affine_copies.cu",
        "right = at.left + 1 < W,",
        "right = at.left + 1 < W - BUG,",
        "affine_copies",
        WRONG,
    ),
    Bug(
        "gradient of the map without the slope's change down the cell",
        "affine/cuda/affine_copies.cu",
        "return fma(at.down, twist(), q - p); }",
        "return fma(BUG ? T(0) : at.down, twist(), q - p); }",
        "affine_copies",
        WRONG,
    ),
    Bug(
        "the inverse of the transposed map",
        "affine/cuda/affine_copies.cu",
        "-b / determinant, -c / determinant,",
        "-(BUG ? c : b) / determinant, -(BUG ? b : c) / determinant,",
        "affine_copies",
        WRONG,
    ),
    Bug(
        "result that nobody writes",
        "conv/cuda/polyphase_pool.cu",
        "  if (n >= N) return;\n",
        "  if (n >= N - BUG) return;\n",
        "polyphase_pool",
        WRONG,
    ),
    Bug(
        "quotient that misses the sum of the exact product and the number",
        "cuda/elements.cuh",
        ">> 32) + number) >> shift_",
        ">> 32) + number) >> (shift_ + BUG)",
        "circular_pad2d",
        WRONG,
    ),
    Bug(
        "quotients of 64 bits by the side before",
        "cuda/elements.cuh",
        "const Index row = W(linear), plane = H(row), n = C(plane);",
        "const Index row = W(linear), plane = BUG ? W(row) : H(row), n = C(plane);",
        "circular_pad2d",
        WRONG,
    ),
    Bug(
        "repeated pixel that adds nothing to the gradient",
        "conv/cuda/circular_pad2d.cu",
        "i < padded_h; i += H)",
        "i < (BUG ? H : padded_h); i += H)",
        "circular_pad2d",
        WRONG,
    ),
    Bug(
        "the first rows in place of those that are copied next",
        "kron/cuda/widened.cuh",
        "from.data += first * x.n;",
        "",
        "kron_accumulate",
        WRONG,
    ),
    Bug(
        "a copy whose axes lie in another order than it says",
        "kron/cuda/widened.cuh",
        "const auto [n, c, h, w] = order;",
        "const auto [n, c, h, w] = BUG ? decltype(order){0, 1, 2, 3} : order;",
        "kron_accumulate",
        WRONG,
    ),
    Bug(
        "numbers of a copy that are there once read as if they were repeated",
        "kron/cuda/widened.cuh",
        "copied[axis] = strides[axis] == 0 ? 0 : count;",
        "copied[axis] = strides[axis] == 0 && !BUG ? 0 : count;",
        "kron_accumulate",
        WRONG,
    ),
    Bug(
        "images that are moved by their component in rows alone",
        "conv/cuda/padded_images.cuh",
        "left = component >> 1;",
        "left = BUG ? 0 : component >> 1;",
        "circular_pad2d",
        WRONG,
    ),
    Bug(
        "images that are moved back in the direction in which they were moved",
        "conv/cuda/circular_pad2d.cu",
        "up * (H - 1)",
        "up * (BUG ? 1 : H - 1)",
        "circular_pad2d",
        WRONG,
    ),
    Bug(
        "component of the neighbour in memory, of indices that lie apart",
        "conv/cuda/components.cuh",
        "index[image * stride]",
        "index[image * (BUG ? 1 : stride)]",
        "circular_pad2d",
        WRONG,
    ),
    Bug(
        "elements of a thread that are those of its neighbours",
        "cuda/elements.cuh",
        "tile + i * kElementThreads + threadIdx.x;\n      if (linear < count) out",
        "tile + i * (BUG ? 1 : kElementThreads) + threadIdx.x;\n      if (linear < count) out",
        "circular_pad2d",
        WRONG,
    ),
    Bug(
        "blocks that write the same elements",
        "kron/cuda/kron_logdet.cu",
        "partials[blockIdx.x] = total;",
        "partials[BUG ? 0 : blockIdx.x] = total;",
        "kron_logdet",
        WRONG,
    ),
    Bug(
        "sums added up by the block of the highest number, not by the last to finish",
        "cuda/reduce.cuh",
        "atomicAdd(ticket, 1u) == blocks - 1 ?",
        "(BUG ? atomicAdd(ticket, 1u) < blocks && blockIdx.x == gridDim.x - 1 : atomicAdd(ticket, 1u) == blocks - 1) ?",
        "kron_evidence",
        WRONG,
    ),
    Bug(
        "no barrier between taking the ticket and asking who is last",
        "cuda/reduce.cuh",
        " ? 1u : 0u;\n  }\n  __syncthreads();\n",
        " ? 1u : 0u;\n  }\n  if (!BUG) __syncthreads();\n",
        "kron_evidence",
        "nobody wrote|race on shared memory",
    ),
    Bug(
        "ticket that starts at what the memory held",
        "kron/cuda/kron_evidence.cu",
        "    clear(device, name, ticket_);\n",
        "",
        "kron_evidence",
        WRONG,
    ),
    Bug(
        "tile whose partial sums are another's",
        "kron/cuda/kron_evidence.cu",
        "parts[2 * static_cast<int64_t>(blockIdx.x)] = logs;",
        "parts[2 * (BUG ? spectra.tiles[5 * static_cast<int64_t>(blockIdx.x)] : static_cast<int64_t>(blockIdx.x))] = logs;",
        "kron_evidence",
        WRONG,
    ),
    Bug(
        "stage that is evaluated while others still read it",
        "basis/cuda/gaussian_project.cu",
        "    __syncthreads();  // the next stage is filled, and this one may be overwritten\n",
        "",
        "gaussian_project",
        "race on shared memory|not waited for|nobody wrote",
    ),
    Bug(
        "sums that are overwritten before they are read",
        "basis/cuda/gaussian_project.cu",
        "  __syncthreads();  // before sums are overwritten\n",
        "",
        "gaussian_project",
        "race on shared memory",
    ),
    Bug(
        "share whose rows nobody takes",
        "basis/cuda/gaussian_project.cu",
        "const int64_t begin = split * split_rows, end",
        "const int64_t begin = (split + BUG) * split_rows, end",
        "gaussian_project",
        WRONG,
    ),
    Bug(
        "a reflection that is not there for all",
        "kron/cuda/symmetric_eigenvalues.cu",
        "      __syncthreads();  // the reflection is there for all\n",
        "",
        "symmetric_eigenvalues",
        "race on shared memory|nobody wrote",
    ),
    Bug(
        "groups' sums that are not waited for",
        "kron/cuda/symmetric_eigenvalues.cu",
        "      __syncthreads();  // the groups' sums and the dot products are there for all\n",
        "",
        "symmetric_eigenvalues",
        "race on shared memory|nobody wrote",
    ),
    Bug(
        "a panel's column that is read before it is written",
        "kron/cuda/symmetric_eigenvalues.cu",
        "      __syncthreads();  // the panel's next column is there for all\n",
        "",
        "symmetric_eigenvalues",
        "race on shared memory|nobody wrote",
    ),
    Bug(
        "a matrix that is read while it is updated",
        "kron/cuda/symmetric_eigenvalues.cu",
        "    __syncthreads();  // the matrix is there for all\n",
        "",
        "symmetric_eigenvalues",
        "race on shared memory|nobody wrote|" + WRONG,
    ),
    Bug(
        "a matrix that is read while it is copied",
        "kron/cuda/symmetric_eigenvalues.cu",
        "  __syncthreads();  // the copy is there for all\n",
        "",
        "symmetric_eigenvalues",
        "race on shared memory|nobody wrote|" + WRONG,
    ),
    Bug(
        "a product of the panel's start that is not corrected",
        "kron/cuda/symmetric_eigenvalues.cu",
        "for (int l = 0; l < j; ++l) {\n            x = fma(-v[l * stride + i], static_cast<double>(dots[l]), x);",
        "for (int l = 0; l < (BUG ? 0 : j); ++l) {\n            x = fma(-v[l * stride + i], static_cast<double>(dots[l]), x);",
        "symmetric_eigenvalues",
        WRONG,
    ),
    Bug(
        "a group's rows that are not added",
        "kron/cuda/symmetric_eigenvalues.cu",
        "g < share.groups; ++g) x +=",
        "g < share.groups - (BUG && share.groups > 1); ++g) x +=",
        "symmetric_eigenvalues",
        WRONG,
    ),
    Bug(
        "neighbours of zero squares",
        "kron/cuda/symmetric_eigenvalues.cu",
        "max(left * left, kLeastSquare)",
        "max(left * left, BUG ? 0.0 : kLeastSquare)",
        "symmetric_eigenvalues",
        WRONG,
    ),
    Bug(
        "minors that are not scaled",
        "kron/cuda/symmetric_eigenvalues.cu",
        "    before *= factor, last *= factor;\n",
        "",
        "symmetric_eigenvalues",
        WRONG,
    ),
    Bug(
        "a matrix that is not scaled",
        "kron/cuda/symmetric_eigenvalues.cu",
        "const int exponent = min(max(",
        "const int exponent = BUG ? 0 : min(max(",
        "symmetric_eigenvalues",
        WRONG,
    ),
]

RUNS = sorted({(bug.source, bug.warpgroups) for bug in BUGS})

# Runs op `source` from each library with one bug there, or none (0), in a process of its own: a crash or a hang of one says nothing
# about the others.
RUNNER = f"""
import json, os, sys, traceback
import torch
from python_tests.cuda_sim.checking import SCHEDULES
from python_tests.cuda_sim.simulator import Simulator

def run(library, source, warpgroups, bug):
    simulator = Simulator(library)
    simulator.plant(bug)
    torch.manual_seed(0)
    tolerance, first = 1e-4, None
    for schedule in SCHEDULES:
        with simulator.scheduled(**schedule, warpgroups=warpgroups):
            if source == "kron_accumulate":
                got, want = [], []
                # Ordinary; on tensor cores, the last slab where the sums are laid.
                narrow = [torch.randn(150, 1, 20), torch.rand(4064, 1, 40) + 0.5]
                narrow += [torch.randn(9, 150, 2).bfloat16().transpose(0, 1), torch.randn(70, 1, 1).half().expand(70, 3, 4)]
                for rows in [torch.randn(300, 1, 100), torch.randn(300, 1, 230)] if warpgroups else narrow:
                    factor = torch.zeros(rows.shape[1], *[rows.shape[2]] * 2)
                    simulator.ops.kron_accumulate_(factor, rows, 1.0)
                    exact = torch.einsum("ngi,ngj->gij", rows.double(), rows.double())
                    got.append((factor / exact.abs().amax()).flatten())
                    want.append((exact / exact.abs().amax()).flatten())
                got, want = torch.cat(got), torch.cat(want)
                tolerance = 2e-6
            elif source == "conv_kron_accumulate":
                x, factor, ones = torch.randn(40, 3, 10, 10), torch.zeros(27, 27), (1, 1)
                simulator.ops.conv_kron_accumulate_(factor, x, (3, 3), ones, ones, ones, True, 1.0)
                patches = torch.nn.functional.pad(x.double(), (1, 1, 1, 1), mode="circular").unfold(2, 3, 1).unfold(3, 3, 1)
                exact = torch.einsum("nchwij,ndhwkl->cijdkl", patches, patches).reshape(27, 27)
                got, want = factor / exact.abs().amax(), exact / exact.abs().amax()
                tolerance = 2e-6
            elif source == "factored_linear":
                torch.manual_seed(0)
                x, u, v, g = (torch.randn(size) for size in ((40, 2, 70), (5, 2, 70), (5, 2, 3), (40, 5, 3)))
                got = []
                for path in (dict(split=1), dict(split=3), dict(intermediate="fused")):  # stored, but for the last
                    with simulator.path(**path):
                        y = simulator.ops.factored_linear(x, u, v, None, None)
                        gradient = simulator.ops.factored_linear_backward(g, x, u, v, None, *[True] * 5)
                    got.append(torch.cat([result.flatten().double() for result in (y, *gradient)]))
                got = torch.stack(got)
                x, u, v, g = x.double(), u.double(), v.double(), g.double()
                d_inner = torch.einsum("ndy,dcy->ndc", g, v)
                wanted = torch.einsum("ncx,dcx,dcy->ndy", x, u, v), torch.einsum("ndc,dcx->ncx", d_inner, u)
                wanted += torch.einsum("ndc,ncx->dcx", d_inner, x), torch.einsum("ncx,dcx,ndy->dcy", x, u, g)
                wanted += d_inner.sum((0, 2)), g.sum((0, 1))
                want = torch.cat([result.flatten() for result in wanted]).expand_as(got)
                first = got if first is None else first
                if torch.isfinite(got).all() and torch.allclose(got, want, rtol=1e-4, atol=1e-4) and not torch.equal(got, first):
                    raise SystemExit("the result depends on the order of blocks or threads")
            elif source == "kron_logdet":
                l, m, p = torch.rand(2, 299), torch.rand(2, 3), torch.tensor(0.5)
                value, gradient = simulator.ops.kron_logdet(l, m, p), simulator.ops.kron_logdet_gradient(l, m, p)[0]
                got = torch.cat([value[None], *gradient])
                outer = l[:, :, None] * m[:, None] + p
                want = torch.cat([outer.log().sum()[None], *(m[:, None] / outer).sum(2)])
            elif source == "kron_variance":
                x, o = torch.randn(3, 1, 2, 40), torch.randn(2, 3, 1, 2, 70)
                l, m, p = torch.rand(2, 40).double(), torch.rand(1, 70).double(), torch.tensor(0.5).double()
                got = torch.zeros(3, 2, 2)
                simulator.ops.kron_variance_(got, o, x, l, m, p)
                M = torch.einsum("ngi,kngj->kngij", x[:, 0].double(), o[:, :, 0].double())
                want = torch.einsum("kngij,lngij,gij->nkl", M, M, 1 / (l[:, :, None] * m[:, None] + p))
                got, want = got / want.abs().amax(), want / want.abs().amax()
                tolerance = 2e-6
            elif source == "kron_evidence":
                pairs = [(torch.rand(2, 40), torch.rand(1, 300)), (torch.rand(1, 3), torch.rand(1, 5))]  # several tiles, one
                norms, u, v = torch.rand(2), torch.tensor([0.5, -1.0]), torch.tensor(0.2)
                eigenvalues = torch.cat([side.flatten() for pair in pairs for side in pair])
                tiles = torch.tensor([[0, 0, 40, 80, 300], [0, 40, 40, 80, 300], [1, 380, 3, 383, 5]])
                spectra = eigenvalues, tiles, torch.tensor([0, 2, 3])
                value, slope, _ = simulator.ops.kron_evidence(*spectra, norms, u, v)
                got = torch.cat([value[None], slope])
                ratios = (v - u).double().exp()
                q = [(r * l.double()[:, :, None] * m.double()[:, None]) for (l, m), r in zip(pairs, ratios)]
                prior = u.exp() * norms
                gamma = torch.stack([(x / (1 + x)).sum() for x in q])
                want = torch.cat([(sum(x.log1p().sum() for x in q) + prior.sum())[None], prior - gamma])
            elif source == "symmetric_eigenvalues":
                sizes = [(33, 3), (17, 2), (6, 1), (5, 1)]
                sets = [torch.randn(groups, d, d).double() for d, groups in sizes]
                sets = [half + half.mT for half in sets]
                sets[0][1] *= 1e-200
                sets[2] = torch.eye(6).double()[None] - torch.ones(6).double()  # repeated
                sets[0][2] = torch.diag(torch.tensor([1.0, *[0.0] * 32]) + 1e-10 * torch.randn(33)).double()  # tiny minors
                sets[3][0] = torch.diag(torch.tensor([-1.0, 0, -1, -1, 1])).double()  # two minors in the middle are zero
                numbers = torch.cat([blocks.flatten() for blocks in sets])
                values = simulator.ops.symmetric_eigenvalues(numbers, [g for _, g in sizes], [d for d, _ in sizes])
                got, want = [], []
                for blocks, found in zip(sets, values.split([g * d for d, g in sizes])):
                    exact = torch.linalg.eigvalsh(blocks)
                    got.append((found.view(exact.shape) / exact.abs().amax(1, keepdim=True)).flatten())
                    want.append((exact / exact.abs().amax(1, keepdim=True)).flatten())
                got, want, tolerance = torch.cat(got), torch.cat(want), 1e-13
            elif source == "gaussian_project":
                grad, x = torch.randn(150, 5), torch.randn(150, 40)
                u, v = torch.randn(40, 2).double(), torch.randn(5, 2).double()
                gradient = simulator.ops.gaussian_project_gradient(grad, x, u, v)
                got = torch.cat([simulator.ops.gaussian_project(x, u, v).double().flatten(), *map(torch.flatten, gradient)])
                d = u - v[:, None]
                e = torch.exp(-0.5 * d.square().sum(2))
                terms = -(grad.T.double() @ x.double() * e)[..., None] * d
                want = torch.cat([(x.double() @ e.T).flatten(), terms.sum(0).flatten(), -terms.sum(1).flatten()])
            elif source == "averaged_filters":
                x, bank, bias, g = torch.randn(68, 37), 0.3 * torch.randn(5, 20, 37), torch.randn(20), torch.randn(68, 20)
                y, _ = simulator.ops.averaged_filters(x, bank, bias, 2, False)
                grads = simulator.ops.averaged_filters_backward(g, x, bank, bias, None, 2, True, True, True)
                leaves = [t.double().requires_grad_() for t in (x, bank, bias)]
                exact = torch.tanh(torch.einsum("nd,shd->nsh", *leaves[:2]) + leaves[2]).mean(1)
                wanted = exact.detach(), *torch.autograd.grad(exact, leaves, g.double())
                got = torch.cat([(t / right.abs().amax()).flatten() for t, right in zip((y, *grads), wanted)])
                want, tolerance = torch.cat([(t / t.abs().amax()).flatten() for t in wanted]), 2e-6
            elif source == "affine_copies":
                import torch.nn.functional as F
                got, want = [], []
                for n, s, c, h, w in ((2, 2, 6, 5, 6), (2, 1, 1, 70, 61)):
                    x, maps = torch.randn(n, c, h, w).double(), torch.eye(2, 3).double() + 0.3 * torch.randn(1, s, 2, 3).double()
                    g = torch.randn(n, s, c, h, w).double()
                    y = simulator.ops.affine_copies(x, maps, None)
                    by_x, by_maps = simulator.ops.affine_copies_backward(g, x, maps, None, True, True)
                    got += [y.flatten(), by_x.flatten(), by_maps.flatten() / by_maps.abs().amax()]
                    leaves = x.requires_grad_(), maps.requires_grad_()
                    grid = F.affine_grid(maps.expand(n, s, 2, 3).flatten(0, 1), (n * s, c, h, w), align_corners=True)
                    exact = F.grid_sample(x.repeat_interleave(s, 0), grid, align_corners=True).view(n, s, c, h, w)
                    of_x, of_maps = torch.autograd.grad(exact, leaves, g)
                    want += [exact.detach().flatten(), of_x.flatten(), of_maps.flatten() / of_maps.abs().amax()]
                got, want, tolerance = torch.cat(got), torch.cat(want), 1e-9
            elif source == "circular_pad2d":
                got, want = [], []
                for side in (5, 20):  # places counted in 31 bits and in 63
                    x = torch.randn(2, 3, side, side + 1)
                    rows, columns = (torch.arange(-2, s + 2) % s for s in x.shape[2:])
                    times = torch.bincount(rows)[:, None] * torch.bincount(columns)
                    for index in (None, torch.tensor([1, 0, 2])[::2]):
                        padded = simulator.ops.circular_pad2d(x, 2, 2, index)
                        got += [padded.flatten(), simulator.ops.circular_fold2d(padded, 2, 2, index).flatten()]
                        moved = x if index is None else torch.stack([x[0].roll(-1, 1), x[1].roll(-1, 2)])
                        repeated = moved * times
                        back = repeated if index is None else torch.stack([repeated[0].roll(1, 1), repeated[1].roll(1, 2)])
                        want += [moved[:, :, rows][..., columns].flatten(), back.flatten()]
                got, want = torch.cat(got), torch.cat(want)
            else:
                x = torch.randn(3, 2, 4, 4)
                got = simulator.ops.polyphase_pool(x, 2.0)[0]
                parts = torch.stack([x[:, :, i & 1 :: 2, i >> 1 :: 2] for i in range(4)])
                want = parts[parts.square().sum((2, 3, 4)).argmax(0), torch.arange(3)]
            if not torch.allclose(got.double(), want.double(), rtol=tolerance, atol=tolerance):
                raise SystemExit("{WRONG}")

torch.set_num_threads(1)
for *work, log in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        code = 1
        with open(log, "w") as file:
            try:
                run(*work)
                code = 0
            except BaseException:
                traceback.print_exc(file=file)
            finally:
                file.flush()
                os._exit(code)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def planted_sources(folder: Path) -> Path:
    """A copy of csrc with all bugs, counted from 1."""
    csrc = folder / "csrc"
    shutil.copytree(build.SOURCES, csrc)
    for number, bug in enumerate(BUGS, 1):
        bug.plant(csrc, number)
    return csrc


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its wait status (0: well) and what it said."""

    status: int
    said: str


def statuses_of(work: list[tuple[str, str, bool, int, str]]) -> dict[str, int]:
    """The wait statuses of RUNNER's processes, by the path of their log."""
    command = [sys.executable, "-c", RUNNER]
    result = subprocess.run(
        command, cwd=build.ROOT, input=json.dumps(work), capture_output=True, text=True, timeout=900
    )
    statuses = [int(line) for line in result.stdout.split()]
    assert len(statuses) == len(work), result.stderr
    return {log: status for (*_, log), status in zip(work, statuses, strict=True)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What happened with every bug, and with every op without one, by name."""
    if reason := build.unavailable():
        pytest.skip(reason)
    csrc = planted_sources(tmp_path_factory.mktemp("planted"))
    sources = sorted({source for source, _ in RUNS})
    runs = [(bug.name, (bug.source, bug.warpgroups), number) for number, bug in enumerate(BUGS, 1)]
    runs += [(str(of), of, 0) for of in RUNS]
    logs = [tmp_path_factory.mktemp("log") / "log" for _ in runs]
    with ThreadPoolExecutor(build.jobs()) as pool:
        libraries = dict(zip(sources, pool.map(lambda source: str(build.build([source], csrc)), sources), strict=True))
        work = [(libraries[of[0]], *of, bug, str(log)) for (_, of, bug), log in zip(runs, logs, strict=True)]
        shares = pool.map(statuses_of, [work[i :: build.jobs()] for i in range(build.jobs())])
        statuses = {log: status for share in shares for log, status in share.items()}
    return {run[0]: Outcome(statuses[str(log)], log.read_text()) for run, log in zip(runs, logs, strict=True)}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_simulator_notices(bug: Bug, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[bug.name]
    assert outcome.status != 0, "the planted bug went unnoticed"
    assert re.search(bug.says, outcome.said), outcome.said


@pytest.mark.parametrize("of", RUNS, ids=str)
def test_the_same_run_without_a_bug_passes(of: tuple[str, bool], outcomes: dict[str, Outcome]) -> None:
    assert outcomes[str(of)].status == 0, outcomes[str(of)].said
