// Weights in the order in which products read them: put there once, read by every product until they are written again,
// as engines do behind a load of weights. In place, as many bytes. What our own kernels make of them has the bits that
// it has of rows.
#pragma once
#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// How a weight of N rows and K columns lies once it is packed.
enum class PackedOrder : std::uint8_t {
  rows,     // as it was: no order serves it better, or none is known for its shape
  quads,    // panels of kQuads² rows, [K/4][row][4] with the rows as quad_of_panel() has them; rows that make no
            // whole panel stay behind them, as they were. What our own kernel reads for any number of rows of x
  pairs64,  // blocks of 64 rows, [K/2][64][2]: what oneDNN multiplies bf16 from (BA16a64b2a), and our own kernel
  pairs32,  // the same of 32 rows
};

/// By shape, type, machine and product paths alone: whoever packs and whoever reads agree. Of bf16 pairs where the
/// machine's unit multiplies rows of some number (our own kernels read both), rows where some rows of x are oneDNN's in
/// fp32, else quads.
PackedOrder packed_order(DType, std::int64_t N, std::int64_t K, const ProductPaths& = rule_of_machine());

/// Rows of a block of pairs, 64 or 32; 0 of the other orders.
std::int64_t rows_of_pairs(PackedOrder);

/// w[N,K], fp32 or bf16, row behind row, into its packed order.
void prepack(KernelContext&, void* w, DType, std::int64_t N, std::int64_t K);

/// The reverse.
void unpack(KernelContext&, void* w, DType, std::int64_t N, std::int64_t K);

}  // namespace hotbunk::kernels
