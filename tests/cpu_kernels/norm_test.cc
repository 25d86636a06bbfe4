#include "backends/cpu_gloo/kernels/norm.h"

#include "tests/cpu_kernels/oracle.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

namespace {

constexpr double kEps = 1e-5;

double rstd_of(std::int64_t n, const std::function<double(std::int64_t)>& x) {
  double sum = 0.0;
  for (std::int64_t j = 0; j < n; ++j) sum += x(j) * x(j);
  return 1.0 / std::sqrt(sum / static_cast<double>(n) + kEps);
}

/// Σ_j dy_j y_j of one row's norm: what finite differences differentiate.
double objective(std::int64_t n, const std::function<double(std::int64_t)>& x,
                 const std::function<double(std::int64_t)>& w, const std::function<double(std::int64_t)>& dy) {
  const double r = rstd_of(n, x);
  double sum = 0.0;
  for (std::int64_t j = 0; j < n; ++j) sum += dy(j) * x(j) * r * w(j);
  return sum;
}

/// ∂objective/∂x_j by central differences (error ~1e-9 in double).
double derivative(std::int64_t n, const std::function<double(std::int64_t)>& x,
                  const std::function<double(std::int64_t)>& w, const std::function<double(std::int64_t)>& dy,
                  std::int64_t j) {
  const double h = 1e-5;
  const auto moved = [&](double by) {
    return objective(
        n, [&](std::int64_t i) { return x(i) + (i == j ? by : 0.0); }, w, dy);
  };
  return (moved(h) - moved(-h)) / (2 * h);
}

struct RowMoments {
  double mean = 0.0, rstd = 0.0;
};
RowMoments moments_of(std::int64_t n, const std::function<double(std::int64_t)>& x) {
  double sum = 0.0, squares = 0.0;
  for (std::int64_t j = 0; j < n; ++j) sum += x(j);
  const double mean = sum / static_cast<double>(n);
  for (std::int64_t j = 0; j < n; ++j) squares += (x(j) - mean) * (x(j) - mean);
  return {mean, 1.0 / std::sqrt(squares / static_cast<double>(n) + kEps)};
}

}  // namespace

TEST_CASE("rmsnorm forward, alone and fused with the residual add") {
  KernelContext ctx(2);
  Random rng(11);
  for (DType dtype : kFloatTypes)
    for (DType w_type : kFloatTypes)
      for (std::int64_t T : {0, 1, 37})
        for (std::int64_t h : {1, 15, 64, 519}) {
          CAPTURE(name_of(dtype), name_of(w_type), T, h);
          const Tensor x = Tensor::random(dtype, T, h, h + 3, rng), delta = Tensor::random(dtype, T, h, h + 1, rng);
          const Tensor w = Tensor::random(w_type, 1, h, h, rng);
          Tensor y(dtype, T, h, h + 5), rstd(DType::f32, T, 1);
          rmsnorm_forward(ctx, x.matrix(), w.vector(), y.matrix(), rstd.f32(), T, h, kEps);
          const auto r_of = [&](const Tensor& t, std::int64_t r) {
            return rstd_of(h, [&](auto j) { return t.at(r, j); });
          };
          check_close(
              rstd, [&](auto t, auto) { return r_of(x, t); }, kF32Tolerance);
          check_close(
              y, [&](auto t, auto j) { return x.at(t, j) * r_of(x, t) * w.at(0, j); }, kF32Tolerance);

          Tensor hidden(dtype, T, h), in_place = x, in_delta = delta, again(dtype, T, h, h + 5);
          add_rmsnorm_forward(ctx, x.matrix(), delta.matrix(), w.vector(), hidden.matrix(), y.matrix(), rstd.f32(), T,
                              h, kEps);
          check_close(
              hidden, [&](auto t, auto j) { return x.at(t, j) + delta.at(t, j); }, kF32Tolerance);
          check_close(
              y, [&](auto t, auto j) { return hidden.at(t, j) * r_of(hidden, t) * w.at(0, j); }, kF32Tolerance);
          add_rmsnorm_forward(ctx, in_place.matrix(), delta.matrix(), w.vector(), in_place.matrix(), again.matrix(),
                              rstd.f32(), T, h, kEps);
          CHECK(again.bytes() == y.bytes());
          add_rmsnorm_forward(ctx, x.matrix(), in_delta.matrix(), w.vector(), in_delta.matrix(), again.matrix(),
                              rstd.f32(), T, h, kEps);
          CHECK(again.bytes() == y.bytes());
        }
}

TEST_CASE(
    "rmsnorm backward equals finite differences, accumulates where told, and sums the weight gradient the same "
    "for any number of threads") {
  KernelContext ctx(2), single(1);
  Random rng(12);
  for (DType dtype : kFloatTypes)
    for (Write write : {Write::overwrite, Write::accumulate})
      for (std::int64_t T : {0, 1, 70}) {
        const std::int64_t h = 33;
        CAPTURE(name_of(dtype), write == Write::accumulate, T);
        const Tensor x = Tensor::random(dtype, T, h, h + 3, rng), dy = Tensor::random(dtype, T, h, h + 2, rng);
        const Tensor w = Tensor::random(dtype, 1, h, h, rng);
        Tensor y(dtype, T, h), rstd(DType::f32, T, 1);
        rmsnorm_forward(ctx, x.matrix(), w.vector(), y.matrix(), rstd.f32(), T, h, kEps);
        const bool keep = write == Write::accumulate;
        const Tensor dx0 = keep ? Tensor::random(dtype, T, h, h + 4, rng) : Tensor::filled(dtype, T, h, h + 4, NAN);
        const Tensor dw0 = keep ? Tensor::random(DType::f32, 1, h, h, rng) : Tensor::filled(DType::f32, 1, h, h, NAN);
        Tensor dx = dx0, dw = dw0, dx1 = dx0, dw1 = dw0;
        rmsnorm_backward(ctx, x.matrix(), w.vector(), rstd.f32(), dy.matrix(), dx.matrix(), write, dw.f32(), write, T,
                         h);
        rmsnorm_backward(single, x.matrix(), w.vector(), rstd.f32(), dy.matrix(), dx1.matrix(), write, dw1.f32(), write,
                         T, h);
        CHECK(dw.bytes() == dw1.bytes());
        CHECK(dx.bytes() == dx1.bytes());
        check_close(
            dx,
            [&](auto t, auto j) {
              return (keep ? dx0.at(t, j) : 0.0) + derivative(
                                                       h, [&](auto i) { return x.at(t, i); },
                                                       [&](auto i) { return w.at(0, i); },
                                                       [&](auto i) { return dy.at(t, i); }, j);
            },
            kF32Tolerance);
        check_close(
            dw,
            [&](auto, auto j) {
              double sum = keep ? dw0.at(0, j) : 0.0;
              for (std::int64_t t = 0; t < T; ++t)
                sum += dy.at(t, j) * x.at(t, j) * rstd_of(h, [&](auto i) { return x.at(t, i); });
              return sum;
            },
            kF32Tolerance);

        Tensor in_place = dy;  // dx may be dy; a frozen weight has no gradient
        rmsnorm_backward(ctx, x.matrix(), w.vector(), rstd.f32(), in_place.matrix(), in_place.matrix(),
                         Write::overwrite, nullptr, Write::overwrite, T, h);
        Tensor apart(dtype, T, h);
        rmsnorm_backward(ctx, x.matrix(), w.vector(), rstd.f32(), dy.matrix(), apart.matrix(), Write::overwrite,
                         nullptr, Write::overwrite, T, h);
        CHECK(error_of(in_place, [&](auto t, auto j) { return apart.at(t, j); }) == 0.0);
      }
}

TEST_CASE("layernorm forward, of rows far from zero and of rows of one number too") {
  KernelContext ctx(2);
  Random rng(13);
  for (DType dtype : kFloatTypes)
    for (DType w_type : kFloatTypes)
      for (std::int64_t T : {0, 1, 37})
        for (std::int64_t h : {1, 15, 64, 519})
          for (const double middle : {0.0, 40.0}) {
            CAPTURE(name_of(dtype), name_of(w_type), T, h, middle);
            Tensor x = Tensor::random(dtype, T, h, h + 3, rng);
            for (std::int64_t t = 0; t < T; ++t)
              for (std::int64_t j = 0; j < h; ++j) x.set(t, j, x.at(t, j) + middle);
            const Tensor w = Tensor::random(w_type, 1, h, h, rng), b = Tensor::random(w_type, 1, h, h, rng);
            Tensor y(dtype, T, h, h + 5), rstd(DType::f32, T, 1);
            layernorm_forward(ctx, x.matrix(), w.vector(), b.vector(), y.matrix(), rstd.f32(), T, h, kEps);
            const auto of = [&](std::int64_t t) { return moments_of(h, [&](auto j) { return x.at(t, j); }); };
            // fp32 keeps a number near 40, and so the mean, to 4e-6 of the deviation.
            const double tolerance = middle == 0.0 ? kF32Tolerance : 4 * kF32Tolerance;
            check_close(
                rstd, [&](auto t, auto) { return of(t).rstd; }, tolerance);
            check_close(
                y, [&](auto t, auto j) { return (x.at(t, j) - of(t).mean) * of(t).rstd * w.at(0, j) + b.at(0, j); },
                tolerance);
          }
}

TEST_CASE(
    "layernorm backward equals finite differences, accumulates where told, and sums weight and bias gradients the same "
    "for any number of threads") {
  KernelContext ctx(2), single(1);
  Random rng(14);
  for (DType dtype : kFloatTypes)
    for (Write write : {Write::overwrite, Write::accumulate})
      for (std::int64_t T : {0, 1, 70}) {
        const std::int64_t h = 33;
        CAPTURE(name_of(dtype), write == Write::accumulate, T);
        const Tensor x = Tensor::random(dtype, T, h, h + 3, rng), dy = Tensor::random(dtype, T, h, h + 2, rng);
        const Tensor w = Tensor::random(dtype, 1, h, h, rng), b = Tensor::random(dtype, 1, h, h, rng);
        Tensor y(dtype, T, h), rstd(DType::f32, T, 1);
        layernorm_forward(ctx, x.matrix(), w.vector(), b.vector(), y.matrix(), rstd.f32(), T, h, kEps);
        const bool keep = write == Write::accumulate;
        const auto before = [&](DType type, std::int64_t rows, std::int64_t stride) {
          return keep ? Tensor::random(type, rows, h, stride, rng) : Tensor::filled(type, rows, h, stride, NAN);
        };
        const Tensor dx0 = before(dtype, T, h + 4), dw0 = before(DType::f32, 1, h), db0 = before(DType::f32, 1, h);
        Tensor dx = dx0, dw = dw0, db = db0, dx1 = dx0, dw1 = dw0, db1 = db0;
        layernorm_backward(ctx, x.matrix(), w.vector(), rstd.f32(), dy.matrix(), dx.matrix(), write, dw.f32(), db.f32(),
                           write, T, h);
        layernorm_backward(single, x.matrix(), w.vector(), rstd.f32(), dy.matrix(), dx1.matrix(), write, dw1.f32(),
                           db1.f32(), write, T, h);
        CHECK((dw.bytes() == dw1.bytes() && db.bytes() == db1.bytes() && dx.bytes() == dx1.bytes()));
        // Of Σ_j dy_j y_j of the row.
        const auto objective_of = [&](std::int64_t t, std::int64_t moved, double by) {
          const auto at = [&](std::int64_t j) { return x.at(t, j) + (j == moved ? by : 0.0); };
          const RowMoments m = moments_of(h, at);
          double sum = 0.0;
          for (std::int64_t j = 0; j < h; ++j) sum += dy.at(t, j) * (at(j) - m.mean) * m.rstd * w.at(0, j);
          return sum;
        };
        check_close(
            dx,
            [&](auto t, auto j) {
              const double step = 1e-5;
              const double derivative = (objective_of(t, j, step) - objective_of(t, j, -step)) / (2 * step);
              return (keep ? dx0.at(t, j) : 0.0) + derivative;
            },
            kF32Tolerance);
        check_close(
            dw,
            [&](auto, auto j) {
              double sum = keep ? dw0.at(0, j) : 0.0;
              for (std::int64_t t = 0; t < T; ++t) {
                const RowMoments m = moments_of(h, [&](auto i) { return x.at(t, i); });
                sum += dy.at(t, j) * (x.at(t, j) - m.mean) * m.rstd;
              }
              return sum;
            },
            kF32Tolerance);
        check_close(
            db,
            [&](auto, auto j) {
              double sum = keep ? db0.at(0, j) : 0.0;
              for (std::int64_t t = 0; t < T; ++t) sum += dy.at(t, j);
              return sum;
            },
            kF32Tolerance);
        Tensor in_place = dy;
        layernorm_backward(ctx, x.matrix(), w.vector(), rstd.f32(), in_place.matrix(), in_place.matrix(),
                           Write::overwrite, dw.f32(), db.f32(), Write::overwrite, T, h);
        Tensor apart(dtype, T, h);
        layernorm_backward(ctx, x.matrix(), w.vector(), rstd.f32(), dy.matrix(), apart.matrix(), Write::overwrite,
                           dw1.f32(), db1.f32(), Write::overwrite, T, h);
        CHECK(error_of(in_place, [&](auto t, auto j) { return apart.at(t, j); }) == 0.0);
      }
}

TEST_CASE("QK-norm normalises every q and k head of packed rows, in place or apart, and its gradient is right") {
  KernelContext ctx(2);
  Random rng(13);
  const HeadShape shape{.num_heads = 4, .num_kv_heads = 2, .head_dim = 20};
  const std::int64_t d = shape.head_dim, heads = 6, width = shape.width();
  for (DType dtype : kFloatTypes)
    for (std::int64_t T : {0, 1, 45}) {
      CAPTURE(name_of(dtype), T);
      const Tensor x = Tensor::random(dtype, T, width, width + 4, rng);
      const Tensor dout = Tensor::random(dtype, T, width, width + 2, rng);
      const Tensor qw = Tensor::random(dtype, 1, d, d, rng), kw = Tensor::random(dtype, 1, d, d, rng);
      const auto weight = [&](std::int64_t head, std::int64_t j) {
        return head < shape.num_heads ? qw.at(0, j) : kw.at(0, j);
      };
      const auto r_of = [&](std::int64_t t, std::int64_t head) {
        return rstd_of(d, [&](auto j) { return x.at(t, head * d + j); });
      };
      Tensor y(dtype, T, width), rstd(DType::f32, T, heads), in_place = x;
      qk_norm_forward(ctx, x.matrix(), qw.vector(), kw.vector(), y.matrix(), rstd.f32(), T, shape, kEps);
      qk_norm_forward(ctx, in_place.matrix(), qw.vector(), kw.vector(), in_place.matrix(), rstd.f32(), T, shape, kEps);
      const Oracle forward = [&](std::int64_t t, std::int64_t c) {
        if (c >= shape.v_offset()) return x.at(t, c);
        return x.at(t, c) * r_of(t, c / d) * weight(c / d, c % d);
      };
      check_close(y, forward, kF32Tolerance);
      check_close(in_place, forward, kF32Tolerance);
      check_close(rstd, r_of, kF32Tolerance);

      for (Write write : {Write::overwrite, Write::accumulate}) {
        const bool keep = write == Write::accumulate;
        const Tensor g0 = keep ? Tensor::random(DType::f32, 2, d, d, rng) : Tensor::filled(DType::f32, 2, d, d, NAN);
        Tensor g = g0, dx = dout;  // in place
        qk_norm_backward(ctx, x.matrix(), qw.vector(), kw.vector(), rstd.f32(), dx.matrix(), dx.matrix(), g.f32(),
                         g.f32() + d, write, T, shape);
        check_close(
            dx,
            [&](auto t, auto c) {
              if (c >= shape.v_offset()) return dout.at(t, c);
              const std::int64_t head = c / d;
              return derivative(
                  d, [&](auto i) { return x.at(t, head * d + i); }, [&](auto i) { return weight(head, i); },
                  [&](auto i) { return dout.at(t, head * d + i); }, c % d);
            },
            kF32Tolerance);
        check_close(
            g,
            [&](auto which, auto j) {
              double sum = keep ? g0.at(which, j) : 0.0;
              for (std::int64_t t = 0; t < T; ++t)
                for (std::int64_t head = 0; head < heads; ++head)
                  if ((head >= shape.num_heads) == (which == 1))
                    sum += dout.at(t, head * d + j) * x.at(t, head * d + j) * r_of(t, head);
              return sum;
            },
            kF32Tolerance);
      }
    }
}
