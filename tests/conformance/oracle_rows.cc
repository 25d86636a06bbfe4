// Ops that compute row by row: data, products, activations, norms, rotations.
#include <bit>
#include <cmath>
#include <numbers>
#include <vector>

#include "base/check.h"
#include "graph/boxes.h"
#include "tests/conformance/oracle.h"

namespace hotbunk::conformance {
namespace {

// --- data -----------------------------------------------------------------------------------------------------------

void zero_formula(OracleCall& c) {
  for (Bounded& x : c.outputs[0].numbers) x = 0.0;
}
void copy_formula(OracleCall& c) {
  for (std::int64_t i = 0; i < c.inputs[0].size(); ++i) c.outputs[0](i) = c.inputs[0](i);
}
/// Ties to even. What is here is no subnormal number of the dtype, and never too large for it.
double nearest(double x, DType to) {
  if (to != DType::bf16 || x == 0.0) return static_cast<float>(x);
  const double unit = std::ldexp(1.0, std::ilogb(x) - 7);  // the last of 8 bits
  return std::nearbyint(x / unit) * unit;
}
/// The nearest of the other dtype, to the bit.
void cast_formula(OracleCall& c) {
  for (std::int64_t i = 0; i < c.inputs[0].size(); ++i) c.outputs[0](i) = nearest(c.inputs[0](i), c.outputs[0].dtype);
}
void add_formula(OracleCall& c) {
  for (std::int64_t i = 0; i < c.inputs[0].size(); ++i) c.outputs[0].put(i, Bounded(c.inputs[0](i)) + c.inputs[1](i));
}
void add_bias_formula(OracleCall& c) {
  for (std::int64_t t = 0; t < c.inputs[0].rows(); ++t)
    for (std::int64_t j = 0; j < c.inputs[0].cols(); ++j)
      c.outputs[0].put(t, j, Bounded(c.inputs[0](t, j)) + c.inputs[1](j));
}
void gather_rows_formula(OracleCall& c) {
  for (std::int64_t s = 0; s < c.inputs[1].size(); ++s)
    for (std::int64_t j = 0; j < c.inputs[0].cols(); ++j) c.outputs[0](s, j) = c.inputs[0](c.inputs[1].whole(s), j);
}
/// use(move, place in the source, place in the destination).
template <class Use>
void each_moved(const OracleCall& c, Use&& use) {
  for (const Move& m : c.drawn.moves) {
    const auto &from = m.from.piece, &to = m.to.piece;
    for (std::int64_t r = 0; r < to.row_end - to.row_begin; ++r)
      for (std::int64_t j = 0; j < to.col_end - to.col_begin; ++j)
        use(m, from.offset + r * from.pitch + j, to.offset + r * to.pitch + j);
  }
}
void copy_boxes_formula(OracleCall& c) {
  each_moved(c, [&](const Move& m, std::int64_t from, std::int64_t to) {
    Wanted& y = c.outputs[static_cast<std::size_t>(m.to.tensor)];
    y(to) = nearest(c.inputs[static_cast<std::size_t>(m.from.tensor)](from), y.dtype);
  });
}
void hash_boxes_formula(OracleCall& c) {
  const auto as = static_cast<DType>(c.op.integer(Attr::as_dtype));
  each_moved(c, [&](const Move&, std::int64_t from, std::int64_t to) {
    const double x = nearest(c.inputs[0](from), as);
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(static_cast<float>(x)) >> (as == DType::bf16 ? 16 : 0);
    // SplitMix64's finaliser of the element's bits and the golden ratio's multiple for its place (base/hash.h says it).
    std::uint64_t z = static_cast<std::uint64_t>(to + 1) * 0x9e3779b97f4a7c15u + bits;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    c.outputs[0].wholes[0] += z ^ z >> 31;
  });
}
void embedding_formula(OracleCall& c) {
  const OracleCall::Ids ids = c.ids();
  for (std::int64_t t = 0; t < c.inputs[1].size(); ++t)
    for (std::int64_t j = 0; j < c.inputs[0].cols(); ++j) {
      const std::int64_t id = c.inputs[1].whole(t);
      c.outputs[0].put(
          t, j, ids.has(id) ? constant(c.op.real(Attr::factor, 1.0)) * c.inputs[0](id - ids.begin, j) : Bounded(0.0));
    }
}
void embedding_backward_formula(OracleCall& c) {
  const OracleCall::Ids ids = c.ids();
  for (std::int64_t v = 0; v < c.outputs[0].rows(); ++v)
    for (std::int64_t j = 0; j < c.outputs[0].cols(); ++j) {
      Sum sum;
      sum += c.before(0, v * c.outputs[0].cols() + j);
      bool any = false;
      for (std::int64_t t = 0; t < c.inputs[0].size(); ++t)
        if (ids.has(ids.begin + v) && c.inputs[0].whole(t) == ids.begin + v)
          sum += constant(c.op.real(Attr::factor, 1.0)) * c.inputs[1](t, j), any = true;
      if (any || !c.asks(Attr::accumulate)) c.outputs[0].put(v, j, sum);
    }
}

// --- products -------------------------------------------------------------------------------------------------------

/// Σ over j of a(j) b(j), each of the products with `more`.
template <class A, class B>
Bounded dot(std::int64_t n, A&& a, B&& b, Bounded more = 0.0) {
  Sum sum;
  sum += more;
  for (std::int64_t j = 0; j < n; ++j) sum += Bounded(a(j)) * b(j);
  return sum;
}
void linear_formula(OracleCall& c) {
  const Numbers &x = c.inputs[0], &w = c.inputs[1];
  for (std::int64_t t = 0; t < x.rows(); ++t)
    for (std::int64_t n = 0; n < w.rows(); ++n)
      c.outputs[0].put(t, n,
                       dot(
                           x.cols(), [&](auto j) { return x(t, j); }, [&](auto j) { return w(n, j); },
                           c.inputs.size() > 2 ? c.inputs[2](n) : 0.0));
}
void linear_dgrad_formula(OracleCall& c) {
  const Numbers &dy = c.inputs[0], &w = c.inputs[1];
  for (std::int64_t t = 0; t < dy.rows(); ++t)
    for (std::int64_t k = 0; k < w.cols(); ++k)
      c.outputs[0].put(t, k,
                       dot(
                           dy.cols(), [&](auto n) { return dy(t, n); }, [&](auto n) { return w(n, k); },
                           c.before(0, t * w.cols() + k)));
}
/// dw (+)= dyᵀ x over rows; db (+)= Σ dy where it is there.
void linear_wgrad_formula(OracleCall& c) {
  const Numbers &dy = c.inputs[0], &x = c.inputs[1];
  Wanted& dw = c.outputs[0];
  for (std::int64_t n = 0; n < dw.rows(); ++n) {
    for (std::int64_t k = 0; k < x.cols(); ++k)
      dw.put(n, k,
             dot(
                 x.rows(), [&](auto t) { return dy(t, n); }, [&](auto t) { return x(t, k); },
                 c.before(0, n * x.cols() + k)));
    if (c.outputs.size() > 1)
      c.outputs[1].put(n, dot(
                              x.rows(), [&](auto t) { return dy(t, n); }, [](auto) { return 1.0; }, c.before(1, n)));
  }
}

void lora_merge_formula(OracleCall& c) {
  const Numbers &w = c.inputs[0], &b = c.inputs[1], &a = c.inputs[2];
  for (std::int64_t n = 0; n < w.rows(); ++n)
    for (std::int64_t k = 0; k < w.cols(); ++k)
      c.outputs[0].put(
          n, k,
          Bounded(w(n, k)) + constant(c.op.real(Attr::factor, 1.0)) *
                                 dot(
                                     a.rows(), [&](auto r) { return b(n, r); }, [&](auto r) { return a(r, k); }));
}

// --- activations ----------------------------------------------------------------------------------------------------

/// A function and its slope.
struct Curve {
  Bounded value, slope;
};
Curve silu(double x, double alpha = 1.0) {
  const Bounded s = sigmoid(constant(alpha) * x);
  return {Bounded(x) * s, s * (Bounded(1) + constant(alpha) * x * (Bounded(1) - s))};
}
Curve gelu_by_tanh(double x) {
  const Bounded c = constant(std::sqrt(2.0 / std::numbers::pi)), cubic = constant(0.044715), square = Bounded(x) * x;
  const Bounded t = tanh(c * (Bounded(x) + cubic * square * x)), half = Bounded(0.5) * (Bounded(1) + t);
  return {half * x, half + Bounded(0.5 * x) * (Bounded(1) - t * t) * c * (Bounded(1) + Bounded(3) * cubic * square)};
}
/// What a gate and what is beside it come to, and both derivatives.
struct Gated {
  Bounded act, by_gate, by_up;
};
Gated gated(const OracleCall& c, double gate, double up) {
  if (c.op.kind == OpKind::clamped_swiglu || c.op.kind == OpKind::clamped_swiglu_backward) {
    const double limit = c.op.real(Attr::limit);
    const Curve g = silu(std::min(gate, limit), c.op.real(Attr::alpha));
    const Bounded beside = Bounded(std::clamp(up, -limit, limit)) + 1.0;
    return {g.value * beside, gate > limit ? Bounded(0.0) : g.slope * beside,
            std::abs(up) > limit ? Bounded(0.0) : g.value};
  }
  const bool gelu = c.op.kind == OpKind::geglu || c.op.kind == OpKind::geglu_backward;
  const Curve g = gelu ? gelu_by_tanh(gate) : silu(gate);
  return {g.value * up, g.slope * up, g.value};
}
void gated_formula(OracleCall& c) {
  const Numbers& x = c.inputs[0];
  const std::int64_t wide = x.cols() / 2;
  for (std::int64_t t = 0; t < x.rows(); ++t)
    for (std::int64_t j = 0; j < wide; ++j) c.outputs[0].put(t, j, gated(c, x(t, j), x(t, wide + j)).act);
}
void gated_backward_formula(OracleCall& c) {
  const Numbers &dy = c.inputs[0], &x = c.inputs[1];
  const std::int64_t wide = dy.cols();
  for (std::int64_t t = 0; t < x.rows(); ++t)
    for (std::int64_t j = 0; j < wide; ++j) {
      const Gated g = gated(c, x(t, j), x(t, wide + j));
      c.outputs[0].put(t, j, g.by_gate * dy(t, j));
      c.outputs[0].put(t, wide + j, g.by_up * dy(t, j));
    }
}
void gelu_formula(OracleCall& c) {
  for (std::int64_t i = 0; i < c.inputs[0].size(); ++i) c.outputs[0].put(i, gelu_by_tanh(c.inputs[0](i)).value);
}
void gelu_backward_formula(OracleCall& c) {
  for (std::int64_t i = 0; i < c.inputs[0].size(); ++i)
    c.outputs[0].put(i, gelu_by_tanh(c.inputs[1](i)).slope * c.inputs[0](i));
}
void softcap_formula(OracleCall& c) {
  const Bounded cap = constant(c.op.real(Attr::softcap));
  for (std::int64_t i = 0; i < c.inputs[0].size(); ++i) c.outputs[0].put(i, cap * tanh(Bounded(c.inputs[0](i)) / cap));
}

// --- norms ----------------------------------------------------------------------------------------------------------

using Row = std::vector<Bounded>;
Bounded mean_of(const Row& x) {
  Sum sum;
  for (const Bounded& of : x) sum += of;
  return Bounded(sum) / static_cast<double>(x.size());
}
Row product_of(const Row& a, const Row& b) {
  Row out;
  for (std::size_t j = 0; j < a.size(); ++j) out.push_back(a[j] * b[j]);
  return out;
}
Row cells_of(const Numbers& x, std::int64_t row, std::int64_t begin, std::int64_t n) {
  Row out;
  for (std::int64_t j = 0; j < n; ++j) out.emplace_back(x(row, begin + j));
  return out;
}
Row cells_of(const Numbers& x, std::int64_t row) { return cells_of(x, row, 0, x.cols()); }
Row less_mean(const Row& x) {
  const Bounded mean = mean_of(x);
  Row out;
  for (const Bounded& of : x) out.push_back(of - mean);
  return out;
}
Bounded rstd_of(const Row& x, double eps) { return Bounded(1) / sqrt(mean_of(product_of(x, x)) + constant(eps)); }

/// x or x + r, as the norm finds it: of a sum what was stored of it.
Row normed_row(OracleCall& c, std::int64_t t, std::size_t residual) {
  if (c.inputs.size() <= residual) return cells_of(c.inputs[0], t);
  Row out;
  for (std::int64_t j = 0; j < c.inputs[0].cols(); ++j) {
    c.outputs[2].put(t, j, Bounded(c.inputs[0](t, j)) + c.inputs[residual](t, j));
    out.push_back(c.outputs[2](t, j));
  }
  return out;
}
void rms_norm_formula(OracleCall& c) {
  for (std::int64_t t = 0; t < c.inputs[0].rows(); ++t) {
    const Row x = normed_row(c, t, 2);
    const Bounded rstd = rstd_of(x, c.op.real(Attr::eps));
    c.outputs[1].put(t, rstd);
    for (std::int64_t j = 0; j < c.inputs[0].cols(); ++j)
      c.outputs[0].put(
          t, j,
          x[static_cast<std::size_t>(j)] * rstd * (Bounded(c.inputs[1](j)) + constant(c.op.real(Attr::offset, 0.0))));
  }
}
/// What is rounded between its parts is what ops of their own would store.
void fused_linear_formula(OracleCall& c) {
  const Numbers& w = c.inputs[1];
  const DType stored = c.inputs[0].dtype();
  const bool norms = c.op.has(Attr::eps), sums = c.outputs.size() > 1, adds = c.asks(Attr::residual);
  std::size_t next = 2;
  const bool has_bias = c.inputs.size() > next + (norms ? 1 : 0) + (sums || adds ? 1 : 0);
  const Numbers* const bias = has_bias ? &c.inputs[next++] : nullptr;
  const Numbers* const norm = norms ? &c.inputs[next++] : nullptr;
  const Numbers* const added = sums || adds ? &c.inputs[next] : nullptr;
  for (std::int64_t t = 0; t < c.inputs[0].rows(); ++t) {
    Row x = cells_of(c.inputs[0], t);
    for (std::int64_t j = 0; sums && j < w.cols(); ++j) {
      c.outputs[1].put(t, j, x[static_cast<std::size_t>(j)] + (*added)(t, j));
      x[static_cast<std::size_t>(j)] = c.outputs[1](t, j);
    }
    if (norms) {
      const Bounded rstd = rstd_of(x, c.op.real(Attr::eps)), offset = constant(c.op.real(Attr::offset, 0.0));
      for (std::int64_t j = 0; j < w.cols(); ++j)
        x[static_cast<std::size_t>(j)] =
            rounded(x[static_cast<std::size_t>(j)] * rstd * (Bounded((*norm)(j)) + offset), stored);
    }
    Row y;
    for (std::int64_t n = 0; n < w.rows(); ++n)
      y.push_back(dot(
          w.cols(), [&](auto j) { return x[static_cast<std::size_t>(j)]; }, [&](auto j) { return w(n, j); },
          bias != nullptr ? (*bias)(n) : 0.0));
    for (std::int64_t n = 0; n < c.outputs[0].cols(); ++n) {
      const Bounded of = y[static_cast<std::size_t>(n)];
      if (c.asks(Attr::gate)) {
        const Bounded gate = rounded(of, stored), up = rounded(y[static_cast<std::size_t>(n + w.rows() / 2)], stored);
        c.outputs[0].put(t, n, gate * sigmoid(gate) * up);
      } else {
        c.outputs[0].put(t, n, adds ? rounded(of, stored) + (*added)(t, n) : of);
      }
    }
  }
}
void layer_norm_formula(OracleCall& c) {
  for (std::int64_t t = 0; t < c.inputs[0].rows(); ++t) {
    const Row x = less_mean(normed_row(c, t, 3));
    const Bounded rstd = rstd_of(x, c.op.real(Attr::eps));
    c.outputs[1].put(t, rstd);
    for (std::int64_t j = 0; j < c.inputs[0].cols(); ++j)
      c.outputs[0].put(t, j, x[static_cast<std::size_t>(j)] * rstd * c.inputs[1](j) + c.inputs[2](j));
  }
}
/// Of y = x̂ w with x̂ = x rstd: dx = rstd (g - x̂ mean(g x̂)) with g = dy w, less mean(g) where x is less its mean.
Row norm_gradient(const Row& dy, const Row& x, const Row& w, Bounded rstd, bool centred) {
  const Row g = product_of(dy, w), normed = product_of(x, Row(x.size(), rstd));
  const Bounded along = mean_of(product_of(g, normed)), middle = centred ? mean_of(g) : Bounded(0.0);
  Row out;
  for (std::size_t j = 0; j < x.size(); ++j) out.push_back(rstd * (g[j] - middle - normed[j] * along));
  return out;
}
Row with_offset(const OracleCall& c, Row w) {
  for (Bounded& x : w) x += constant(c.op.real(Attr::offset, 0.0));
  return w;
}
void norm_backward(OracleCall& c, bool centred) {
  const Numbers &dy = c.inputs[0], &x = c.inputs[1], &w = c.inputs[2], &rstd = c.inputs[3];
  std::vector<Sum> dw(static_cast<std::size_t>(x.cols())), db = dw;
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    const Row of = centred ? less_mean(cells_of(x, t)) : cells_of(x, t);
    const Row dx = norm_gradient(cells_of(dy, t), of, with_offset(c, cells_of(w, 0)), rstd(t), centred);
    for (std::int64_t j = 0; j < x.cols(); ++j) {
      const auto i = static_cast<std::size_t>(j);
      c.outputs[0].put(t, j, dx[i] + c.before(0, t * x.cols() + j, Attr::residual));
      dw[i] += of[i] * rstd(t) * dy(t, j), db[i] += dy(t, j);
    }
  }
  for (std::size_t o = 1; o < c.outputs.size(); ++o)
    for (std::int64_t j = 0; j < x.cols(); ++j) {
      const auto i = static_cast<std::size_t>(j);
      c.outputs[o].put(j, Bounded(o == 1 ? dw[i] : db[i]) + c.before(o, j));
    }
}
void rms_norm_backward_formula(OracleCall& c) { norm_backward(c, false); }
void layer_norm_backward_formula(OracleCall& c) { norm_backward(c, true); }

/// Query and key heads of packed rows; values are what they were.
void qk_norm_formula(OracleCall& c) {
  const std::int64_t a = c.op.integer(Attr::heads), k = c.op.integer(Attr::kv_heads), d = c.op.integer(Attr::head_dim);
  const Numbers& x = c.inputs[0];
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    for (std::int64_t j = (a + k) * d; j < x.cols(); ++j) c.outputs[0](t, j) = x(t, j);
    for (std::int64_t h = 0; h < a + k; ++h) {
      const Row of = cells_of(x, t, h * d, d);
      const Row w = with_offset(c, cells_of(c.inputs[h < a ? 1 : 2], 0));
      const Bounded rstd = rstd_of(of, c.op.real(Attr::eps));
      c.outputs[1].put(t, h, rstd);
      for (std::int64_t j = 0; j < d; ++j) {
        const auto i = static_cast<std::size_t>(j);
        c.outputs[0].put(t, h * d + j, of[i] * rstd * w[i]);
      }
    }
  }
}
void qk_norm_backward_formula(OracleCall& c) {
  const std::int64_t a = c.op.integer(Attr::heads), k = c.op.integer(Attr::kv_heads), d = c.op.integer(Attr::head_dim);
  const Numbers &dy = c.inputs[0], &x = c.inputs[1], &rstd = c.inputs[4];
  std::vector<std::vector<Sum>> dw(2, std::vector<Sum>(static_cast<std::size_t>(d)));
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    for (std::int64_t j = (a + k) * d; j < x.cols(); ++j) c.outputs[0](t, j) = dy(t, j);
    for (std::int64_t h = 0; h < a + k; ++h) {
      const Row of = cells_of(x, t, h * d, d);
      const Row w = with_offset(c, cells_of(c.inputs[h < a ? 2 : 3], 0));
      const Row dx = norm_gradient(cells_of(dy, t, h * d, d), of, w, rstd(t, h), false);
      for (std::int64_t j = 0; j < d; ++j) {
        const auto i = static_cast<std::size_t>(j);
        c.outputs[0].put(t, h * d + j, dx[i]);
        dw[h < a ? 0 : 1][i] += of[i] * rstd(t, h) * dy(t, h * d + j);
      }
    }
  }
  for (std::size_t o = 1; o < c.outputs.size(); ++o)
    for (std::int64_t j = 0; j < d; ++j)
      c.outputs[o].put(j, Bounded(dw[o - 1][static_cast<std::size_t>(j)]) + c.before(o, j));
}

// --- rotations ------------------------------------------------------------------------------------------------------

/// Turns the pair of numbers (low, high) by a position times the j-th of `half` frequencies: theta^(-j / half).
struct Turned {
  Bounded low, high;
};
Turned turned(const OracleCall& c, double position, std::int64_t j, std::int64_t half, double low, double high,
              bool backward) {
  for (const Attr scaled : {Attr::rope_factor, Attr::rope_low, Attr::rope_ramp_begin})
    HB_CHECK(!c.op.has(scaled), "scaled frequencies have no formula");
  const double power = -static_cast<double>(j) / static_cast<double>(half);
  const Bounded angle = constant(std::pow(c.op.real(Attr::rope_theta), power)) * position;
  const Bounded amplitude = constant(c.op.real(Attr::rope_amplitude, 1.0));
  const Bounded cosine = amplitude * cos(angle), sine = (backward ? -amplitude : amplitude) * sin(angle);
  return {cosine * low - sine * high, cosine * high + sine * low};
}
/// In place: of a head its first numbers j and j + half, or with rope_dim its last ones, neighbours.
void rope_formula(OracleCall& c) {
  const bool backward = c.op.kind == OpKind::rope_backward, neighbours = c.op.has(Attr::rope_dim);
  const std::int64_t a = c.op.integer(Attr::heads), k = c.op.integer(Attr::kv_heads), d = c.op.integer(Attr::head_dim);
  const std::int64_t turn = c.op.integer(Attr::rope_dim, c.op.integer(Attr::rope_first, d)), half = turn / 2;
  const Numbers& x = c.inputs[0];
  for (std::int64_t t = 0; t < x.rows(); ++t)
    for (std::int64_t h = 0; h < (neighbours ? a : a + k); ++h)
      for (std::int64_t j = 0; j < half; ++j) {
        const std::int64_t low = neighbours ? (h + 1) * d - turn + 2 * j : h * d + j,
                           high = low + (neighbours ? 1 : half);
        const Turned y = turned(c, c.inputs[1](t), j, half, x(t, low), x(t, high), backward);
        c.outputs[0].put(t, low, y.low);
        c.outputs[0].put(t, high, y.high);
      }
}
void latent_norm_formula(OracleCall& c) {
  const Numbers &x = c.inputs[0], &w = c.inputs[1];
  const std::int64_t r = w.size(), half = c.op.integer(Attr::rope_dim) / 2;
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    const Row of = cells_of(x, t, 0, r);
    const Bounded rstd = rstd_of(of, c.op.real(Attr::eps));
    c.outputs[2].put(t, rstd);
    for (std::int64_t j = 0; j < r; ++j) c.outputs[0].put(t, j, of[static_cast<std::size_t>(j)] * rstd * w(j));
    for (std::int64_t j = 0; j < half; ++j) {
      const Turned y = turned(c, c.inputs[2](t), j, half, x(t, r + 2 * j), x(t, r + 2 * j + 1), false);
      c.outputs[1].put(t, 2 * j, y.low);
      c.outputs[1].put(t, 2 * j + 1, y.high);
    }
  }
}
void latent_norm_backward_formula(OracleCall& c) {
  const Numbers &dc = c.inputs[0], &ds = c.inputs[1], &x = c.inputs[2], &w = c.inputs[3], &rstd = c.inputs[4];
  const std::int64_t r = w.size(), half = ds.cols() / 2;
  std::vector<Sum> dw(static_cast<std::size_t>(r));
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    const Row of = cells_of(x, t, 0, r), dx = norm_gradient(cells_of(dc, t), of, cells_of(w, 0), rstd(t), false);
    for (std::int64_t j = 0; j < r; ++j) {
      c.outputs[0].put(t, j, dx[static_cast<std::size_t>(j)]);
      dw[static_cast<std::size_t>(j)] += of[static_cast<std::size_t>(j)] * rstd(t) * dc(t, j);
    }
    for (std::int64_t j = 0; j < half; ++j) {
      const Turned y = turned(c, c.inputs[5](t), j, half, ds(t, 2 * j), ds(t, 2 * j + 1), true);
      c.outputs[0].put(t, r + 2 * j, y.low);
      c.outputs[0].put(t, r + 2 * j + 1, y.high);
    }
  }
  for (std::int64_t j = 0; c.outputs.size() > 1 && j < r; ++j)
    c.outputs[1].put(j, Bounded(dw[static_cast<std::size_t>(j)]) + c.before(1, j));
}

}  // namespace

std::span<const NamedFormula> row_formulas() {
  static constexpr NamedFormula all[] = {{OpKind::zero, zero_formula},
                                         {OpKind::copy, copy_formula},
                                         {OpKind::cast, cast_formula},
                                         {OpKind::add, add_formula},
                                         {OpKind::add_bias, add_bias_formula},
                                         {OpKind::gather_rows, gather_rows_formula},
                                         {OpKind::copy_boxes, copy_boxes_formula},
                                         {OpKind::hash_boxes, hash_boxes_formula},
                                         {OpKind::embedding, embedding_formula},
                                         {OpKind::embedding_backward, embedding_backward_formula},
                                         {OpKind::linear, linear_formula},
                                         {OpKind::fused_linear, fused_linear_formula},
                                         {OpKind::linear_dgrad, linear_dgrad_formula},
                                         {OpKind::linear_wgrad, linear_wgrad_formula},
                                         {OpKind::lora_merge, lora_merge_formula},
                                         {OpKind::swiglu, gated_formula},
                                         {OpKind::geglu, gated_formula},
                                         {OpKind::clamped_swiglu, gated_formula},
                                         {OpKind::swiglu_backward, gated_backward_formula},
                                         {OpKind::geglu_backward, gated_backward_formula},
                                         {OpKind::clamped_swiglu_backward, gated_backward_formula},
                                         {OpKind::gelu, gelu_formula},
                                         {OpKind::gelu_backward, gelu_backward_formula},
                                         {OpKind::softcap, softcap_formula},
                                         {OpKind::rms_norm, rms_norm_formula},
                                         {OpKind::rms_norm_backward, rms_norm_backward_formula},
                                         {OpKind::layer_norm, layer_norm_formula},
                                         {OpKind::layer_norm_backward, layer_norm_backward_formula},
                                         {OpKind::qk_norm, qk_norm_formula},
                                         {OpKind::qk_norm_backward, qk_norm_backward_formula},
                                         {OpKind::rope, rope_formula},
                                         {OpKind::rope_backward, rope_formula},
                                         {OpKind::latent_norm, latent_norm_formula},
                                         {OpKind::latent_norm_backward, latent_norm_backward_formula}};
  return all;
}

}  // namespace hotbunk::conformance
