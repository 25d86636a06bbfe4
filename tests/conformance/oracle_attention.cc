// Attention in every form, and what packs, splits and keeps its operands.
#include <functional>
#include <vector>

#include "tests/conformance/oracle.h"

namespace hotbunk::conformance {
namespace {

/// Packed rows: a query heads of d numbers, k key heads of d, k value heads of v.
struct Heads {
  std::int64_t a, k, d, v;
  std::int64_t key(std::int64_t kv) const { return (a + kv) * d; }
  std::int64_t value(std::int64_t kv) const { return (a + k) * d + kv * v; }
  std::int64_t kv_of(std::int64_t head) const { return head / (a / k); }
};
Heads heads_of(const OracleCall& c) {
  const std::int64_t d = c.op.integer(Attr::head_dim);
  return {c.op.integer(Attr::heads), c.op.integer(Attr::kv_heads), d, c.op.integer(Attr::value_dim, d)};
}

/// A query's score of a key, as the softmax sees it, and its slope by the product q k.
struct Score {
  Bounded value, slope;
};
using Vector = std::vector<Bounded>;
Score score_of(const OracleCall& c, const Vector& q, const Vector& k) {
  Sum product;
  for (std::size_t j = 0; j < q.size(); ++j) product += q[j] * k[j];
  const Bounded scale = constant(c.op.real(Attr::scale, 1.0 / std::sqrt(static_cast<double>(q.size()))));
  const Bounded scaled = scale * product;
  const double cap = c.op.real(Attr::softcap, 0.0);
  if (cap <= 0) return {scaled, scale};
  const Bounded bent = tanh(scaled / cap);
  return {Bounded(cap) * bent, scale * (Bounded(1) - bent * bent)};
}

/// Attention of one query to the keys that it sees: o and their log-sum-exp, -inf and zeros of none.
struct Attended {
  Vector o;
  Bounded lse;
};
/// Weights meet values in the dtype that products on tensor cores take.
Attended attend(const OracleCall& c, const Vector& q, const std::vector<Vector>& keys,
                const std::vector<Vector>& values, std::int64_t wide, DType weights) {
  Attended out{Vector(static_cast<std::size_t>(wide), Bounded(0.0)), -INFINITY};
  if (keys.empty()) return out;
  Vector scores;
  double top = -INFINITY;
  for (const Vector& k : keys) scores.push_back(score_of(c, q, k).value), top = std::max(top, scores.back().value);
  Sum all;
  std::vector<Sum> o(out.o.size());
  for (std::size_t u = 0; u < keys.size(); ++u) {
    const Bounded p = exp(scores[u] - top);
    all += p;
    for (std::size_t j = 0; j < o.size(); ++j) o[j] += rounded(p, weights) * values[u][j];
  }
  for (std::size_t j = 0; j < o.size(); ++j) out.o[j] = Bounded(o[j]) / all;
  out.lse = Bounded(top) + log(all);
  return out;
}
Vector vector_of(const Numbers& x, std::int64_t row, std::int64_t begin, std::int64_t n) {
  Vector out;
  for (std::int64_t j = 0; j < n; ++j) out.emplace_back(x(row, begin + j));
  return out;
}

/// The first position that a query at `position` sees.
std::int64_t first_seen(const OracleCall& c, std::int64_t position) {
  const std::int64_t window = c.op.integer(Attr::window, 0);
  return window > 0 ? std::max<std::int64_t>(0, position - window + 1) : 0;
}

/// Which key and value rows a query row sees, of each query row of packed sequences: use(query row, its key rows).
using KeyRows = std::vector<std::int64_t>;
void each_query(const OracleCall& c, const Numbers& cu, const std::function<void(std::int64_t, const KeyRows&)>& use) {
  for (std::int64_t s = 0; s + 1 < cu.size(); ++s)
    for (std::int64_t t = cu.whole(s); t < cu.whole(s + 1); ++t) {
      KeyRows rows;
      for (std::int64_t p = first_seen(c, t - cu.whole(s)); p <= t - cu.whole(s); ++p) rows.push_back(cu.whole(s) + p);
      use(t, rows);
    }
}

void attention_formula(OracleCall& c) {
  const Heads n = heads_of(c);
  const Numbers& x = c.inputs[0];
  each_query(c, c.inputs[1], [&](std::int64_t t, const KeyRows& rows) {
    for (std::int64_t h = 0; h < n.a; ++h) {
      std::vector<Vector> keys, values;
      for (const std::int64_t u : rows) {
        keys.push_back(vector_of(x, u, n.key(n.kv_of(h)), n.d));
        values.push_back(vector_of(x, u, n.value(n.kv_of(h)), n.v));
      }
      const Attended found = attend(c, vector_of(x, t, h * n.d, n.d), keys, values, n.v, x.dtype());
      for (std::int64_t j = 0; j < n.v; ++j) c.outputs[0].put(t, h * n.v + j, found.o[static_cast<std::size_t>(j)]);
      c.outputs[1].put(t, h, found.lse);
    }
  });
}

/// Gradients of one query and head, of the o and log-sum-exp that it is given: add(what, row, column, term).
enum class Of { query, key, value };
struct GradientOf {
  const Numbers &d_o, &o, &lse;
  std::int64_t t, head, kv;  // the query's row, its head, and the head that it shares
};
template <class Add>
void differentiate(const OracleCall& c, const Heads& n, const GradientOf& g, const Vector& q, const KeyRows& rows,
                   const std::vector<Vector>& keys, const std::vector<Vector>& values, DType weights, Add&& add) {
  const auto d_o = [&](std::int64_t j) { return Bounded(g.d_o(g.t, g.head * n.v + j)); };
  Sum delta;
  for (std::int64_t j = 0; j < n.v; ++j) delta += d_o(j) * g.o(g.t, g.head * n.v + j);
  for (std::size_t u = 0; u < rows.size(); ++u) {
    const Score s = score_of(c, q, keys[u]);
    const Bounded p = exp(s.value - g.lse(g.t, g.head));
    Sum dp;
    for (std::int64_t j = 0; j < n.v; ++j) {
      dp += d_o(j) * values[u][static_cast<std::size_t>(j)];
      add(Of::value, rows[u], j, rounded(p, weights) * d_o(j));
    }
    const Bounded ds = rounded(p * (Bounded(dp) - delta) * s.slope, weights);
    for (std::int64_t j = 0; j < n.d; ++j) {
      add(Of::query, g.t, j, ds * keys[u][static_cast<std::size_t>(j)]);
      add(Of::key, rows[u], j, ds * q[static_cast<std::size_t>(j)]);
    }
  }
}

void attention_backward_formula(OracleCall& c) {
  const Heads n = heads_of(c);
  const Numbers& x = c.inputs[1];
  std::vector<Sum> dx(static_cast<std::size_t>(x.size()));
  each_query(c, c.inputs[4], [&](std::int64_t t, const KeyRows& rows) {
    for (std::int64_t h = 0; h < n.a; ++h) {
      const std::int64_t kv = n.kv_of(h);
      std::vector<Vector> keys, values;
      for (const std::int64_t u : rows) {
        keys.push_back(vector_of(x, u, n.key(kv), n.d));
        values.push_back(vector_of(x, u, n.value(kv), n.v));
      }
      differentiate(
          c, n, {c.inputs[0], c.inputs[2], c.inputs[3], t, h, kv}, vector_of(x, t, h * n.d, n.d), rows, keys, values,
          x.dtype(), [&](Of what, std::int64_t row, std::int64_t j, Bounded term) {
            const std::int64_t column = what == Of::query ? h * n.d : what == Of::key ? n.key(kv) : n.value(kv);
            dx[static_cast<std::size_t>(row * x.cols() + column + j)] += term;
          });
    }
  });
  for (std::int64_t i = 0; i < x.size(); ++i) c.outputs[0].put(i, dx[static_cast<std::size_t>(i)]);
}

// --- of a group's ranks, each of which has some chunks of every sequence --------------------------------------------

/// Of each sequence, cut into 2 ranks chunks, rank r has the r-th and the r-th from the end.
struct Chunks {
  std::int64_t ranks, chunk;  // rows of one chunk of this sequence
  std::int64_t position(std::int64_t rank, std::int64_t local) const {
    return local < chunk ? rank * chunk + local : (2 * ranks - 1 - rank) * chunk + local - chunk;
  }
};
/// use(query row, rows that it sees of all that are here, part after part).
void each_shared_query(const OracleCall& c, const Numbers& kv, const Numbers& cu,
                       const std::function<void(std::int64_t, const KeyRows&)>& use) {
  const std::int64_t ranks = c.op.integer(Attr::ranks), parts = kv.extent(0), rows_each = kv.extent(1);
  for (std::int64_t s = 0; s + 1 < cu.size(); ++s) {
    const std::int64_t begin = cu.whole(s), own = cu.whole(s + 1) - begin;
    const Chunks chunks{ranks, own / 2};
    for (std::int64_t t = 0; t < own; ++t) {
      const std::int64_t position = chunks.position(c.place, t);
      KeyRows rows;
      for (std::int64_t part = 0; part < parts; ++part) {
        const std::int64_t of = parts > 1 ? part : (c.place + c.op.integer(Attr::source, 0)) % ranks;
        for (std::int64_t u = 0; u < own; ++u) {
          const std::int64_t at = chunks.position(of, u);
          if (at <= position && at >= first_seen(c, position)) rows.push_back(part * rows_each + begin + u);
        }
      }
      use(begin + t, rows);
    }
  }
}
/// Rows of 2 k d numbers: keys, then values.
struct KeysValues {
  std::vector<Vector> keys, values;
};
KeysValues shared_keys(const Heads& n, const Numbers& kv, const KeyRows& rows, std::int64_t head) {
  KeysValues out;
  for (const std::int64_t u : rows) {
    out.keys.push_back(vector_of(kv, u, head * n.d, n.d));
    out.values.push_back(vector_of(kv, u, n.k * n.d + head * n.v, n.v));
  }
  return out;
}
void context_attention_formula(OracleCall& c) {
  const Heads n = heads_of(c);
  Wanted &o = c.outputs[0], &lse = c.outputs[1];
  each_shared_query(c, c.inputs[1], c.inputs[2], [&](std::int64_t t, const KeyRows& rows) {
    for (std::int64_t h = 0; h < n.a; ++h) {
      const KeysValues kv = shared_keys(n, c.inputs[1], rows, n.kv_of(h));
      Attended found = attend(c, vector_of(c.inputs[0], t, h * n.d, n.d), kv.keys, kv.values, n.v, DType::f32);
      if (c.asks(Attr::accumulate) && rows.empty()) continue;
      if (c.asks(Attr::accumulate)) {
        const Bounded before = lse(t, h), top = std::max(before.value, found.lse.value);
        const Bounded all = top + log(exp(before - top) + exp(found.lse - top));
        for (std::int64_t j = 0; j < n.v; ++j) {
          Bounded& of = found.o[static_cast<std::size_t>(j)];
          of = of * exp(found.lse - all) + o(t, h * n.v + j) * exp(before - all);
        }
        found.lse = all;
      }
      for (std::int64_t j = 0; j < n.v; ++j) o.put(t, h * n.v + j, found.o[static_cast<std::size_t>(j)]);
      lse.put(t, h, found.lse);
    }
  });
}
void context_attention_backward_formula(OracleCall& c) {
  const Heads n = heads_of(c);
  const Numbers &x = c.inputs[1], &all = c.inputs[2];
  std::vector<Sum> dq(c.outputs[0].numbers.size()), d_kv(c.outputs[1].numbers.size());
  each_shared_query(c, all, c.inputs[5], [&](std::int64_t t, const KeyRows& rows) {
    for (std::int64_t h = 0; h < n.a; ++h) {
      const std::int64_t shared = n.kv_of(h);
      const KeysValues kv = shared_keys(n, all, rows, shared);
      differentiate(c, n, {c.inputs[0], c.inputs[3], c.inputs[4], t, h, shared}, vector_of(x, t, h * n.d, n.d), rows,
                    kv.keys, kv.values, DType::f32, [&](Of what, std::int64_t row, std::int64_t j, Bounded term) {
                      if (what == Of::query) {
                        dq[static_cast<std::size_t>(row * c.outputs[0].cols() + h * n.d + j)] += term;
                      } else {
                        const std::int64_t column = what == Of::key ? shared * n.d : n.k * n.d + shared * n.v;
                        d_kv[static_cast<std::size_t>(row * all.cols() + column + j)] += term;
                      }
                    });
    }
  });
  for (std::size_t i = 0; i < dq.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    c.outputs[0].put(at, Bounded(dq[i]) + c.before(0, at));
  }
  for (std::size_t i = 0; i < d_kv.size(); ++i) c.outputs[1].put(static_cast<std::int64_t>(i), d_kv[i]);
}

// --- engines --------------------------------------------------------------------------------------------------------

/// Where a rank keeps what: of `ranks`, every so-manieth token.
struct Pool {
  std::int64_t block, ranks;
};
Pool pool_of(const OracleCall& c) { return {c.op.integer(Attr::block_tokens), c.op.integer(Attr::ranks, 1)}; }
/// The place in this rank's pool of a slot, which counts all ranks' tokens; -1: it is another rank's, or none.
std::int64_t own_slot(const OracleCall& c, std::int64_t slot) {
  const Pool p = pool_of(c);
  return slot < 0 || slot % p.ranks != c.place ? -1 : slot / p.ranks;
}
void kv_write_formula(OracleCall& c) {
  const Heads n = heads_of(c);
  const Numbers& x = c.inputs[0];
  const std::int64_t block = pool_of(c).block;
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    const std::int64_t slot = own_slot(c, c.inputs[1].whole(t));
    if (slot < 0) continue;
    for (std::int64_t h = 0; h < n.k; ++h) {
      const std::int64_t row = slot / block * 2 * n.k + h, at = slot % block * n.d;  // a block's keys, then its values
      for (std::int64_t j = 0; j < n.d; ++j) {
        c.outputs[0](row, at + j) = x(t, n.key(h) + j);
        c.outputs[0](row + n.k, at + j) = x(t, n.value(h) + j);
      }
    }
  }
}
void latent_write_formula(OracleCall& c) {
  const Numbers &latent = c.inputs[0], &shared = c.inputs[1];
  for (std::int64_t t = 0; t < latent.rows(); ++t) {
    const std::int64_t slot = own_slot(c, c.inputs[2].whole(t));
    if (slot < 0) continue;
    for (std::int64_t j = 0; j < latent.cols(); ++j) c.outputs[0](slot, j) = latent(t, j);
    for (std::int64_t j = 0; j < shared.cols(); ++j) c.outputs[0](slot, latent.cols() + j) = shared(t, j);
  }
}

/// use(query row, places in this rank's pool of the keys that it sees).
void each_paged_query(const OracleCall& c, const Numbers& cu, const Numbers& tables, const Numbers& lengths,
                      const std::function<void(std::int64_t, const KeyRows&)>& use) {
  const Pool pool = pool_of(c);
  for (std::int64_t s = 0; s + 1 < cu.size(); ++s) {
    const std::int64_t before = lengths.whole(s) - (cu.whole(s + 1) - cu.whole(s));
    for (std::int64_t t = cu.whole(s); t < cu.whole(s + 1); ++t) {
      const std::int64_t position = before + t - cu.whole(s);
      KeyRows rows;
      for (std::int64_t p = first_seen(c, position); p <= position; ++p) {
        if (p % pool.ranks != c.place) continue;
        const std::int64_t held = p / pool.ranks;
        rows.push_back(tables.whole(s * tables.cols() + held / pool.block) * pool.block + held % pool.block);
      }
      use(t, rows);
    }
  }
}
void put_attended(OracleCall& c, std::int64_t t, std::int64_t h, const Attended& found) {
  const auto wide = std::ssize(found.o);
  for (std::int64_t j = 0; j < wide; ++j) c.outputs[0].put(t, h * wide + j, found.o[static_cast<std::size_t>(j)]);
  if (c.outputs.size() > 1) c.outputs[1].put(t, h, found.lse);
}
void paged_attention_formula(OracleCall& c) {
  const Heads n = heads_of(c);
  const Numbers &x = c.inputs[0], &pool = c.inputs[1];
  const std::int64_t block = pool_of(c).block;
  each_paged_query(c, c.inputs[2], c.inputs[3], c.inputs[4], [&](std::int64_t t, const KeyRows& rows) {
    for (std::int64_t h = 0; h < n.a; ++h) {
      std::vector<Vector> keys, values;
      for (const std::int64_t slot : rows) {
        const std::int64_t row = slot / block * 2 * n.k + n.kv_of(h), at = slot % block * n.d;
        keys.push_back(vector_of(pool, row, at, n.d));
        values.push_back(vector_of(pool, row + n.k, at, n.d));
      }
      put_attended(c, t, h, attend(c, vector_of(x, t, h * n.d, n.d), keys, values, n.d, x.dtype()));
    }
  });
}
/// Of what is kept of a token its head's key (d - t numbers, then the t that all heads share) and value are made anew.
void latent_attention_formula(OracleCall& c) {
  const Heads n = heads_of(c);
  const std::int64_t shared = c.op.integer(Attr::rope_dim), own = n.d - shared;
  const Numbers &x = c.inputs[0], &pool = c.inputs[1], &w = c.inputs[2];
  const auto made = [&](std::int64_t slot, std::int64_t row) {  // as the linear layer stores it
    Sum sum;
    for (std::int64_t j = 0; j < w.cols(); ++j) sum += Bounded(w(row, j)) * pool(slot, j);
    return rounded(sum, x.dtype());
  };
  each_paged_query(c, c.inputs[3], c.inputs[4], c.inputs[5], [&](std::int64_t t, const KeyRows& rows) {
    for (std::int64_t h = 0; h < n.a; ++h) {
      std::vector<Vector> keys, values;
      for (const std::int64_t slot : rows) {
        Vector& key = keys.emplace_back();
        Vector& value = values.emplace_back();
        for (std::int64_t j = 0; j < own; ++j) key.push_back(made(slot, h * (own + n.v) + j));
        for (std::int64_t j = 0; j < shared; ++j) key.emplace_back(pool(slot, w.cols() + j));
        for (std::int64_t j = 0; j < n.v; ++j) value.push_back(made(slot, h * (own + n.v) + own + j));
      }
      put_attended(c, t, h, attend(c, vector_of(x, t, h * n.d, n.d), keys, values, n.v, x.dtype()));
    }
  });
}

// --- sinks ----------------------------------------------------------------------------------------------------------

/// log Σ exp of these; -inf of none that counts.
Bounded log_sum_exp(const Vector& of) {
  double top = -INFINITY;
  for (const Bounded& x : of) top = std::max(top, x.value);
  if (top == -INFINITY) return top;
  Sum sum;
  for (const Bounded& x : of) sum += exp(x - top);
  return Bounded(top) + log(sum);
}
/// One more score of each head, or the log-sum-exps of all ranks' keys in the place of a rank's own.
void attention_sinks_formula(OracleCall& c) {
  Wanted &o = c.outputs[0], &lse = c.outputs[1];
  const Numbers& beside = c.inputs[2];
  const bool parts = c.op.has(Attr::ranks);
  const std::int64_t heads = lse.cols(), d = o.cols() / heads, T = lse.rows();
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t h = 0; h < heads; ++h) {
      const Bounded own = lse(t, h);
      Vector all;
      if (!parts) all = {own, beside(h)};
      for (std::int64_t r = 0; parts && r < beside.extent(0); ++r) all.emplace_back(beside(r * T + t, h));
      const Bounded sum = log_sum_exp(all), share = exp(own - sum);
      for (std::int64_t j = 0; j < d; ++j) o.put(t, h * d + j, share * o(t, h * d + j));
      lse.put(t, h, sum);
    }
}
void attention_sinks_backward_formula(OracleCall& c) {
  const Numbers &d_o = c.inputs[0], &o = c.inputs[1], &lse = c.inputs[2], &sinks = c.inputs[3];
  const std::int64_t heads = lse.cols(), d = o.cols() / heads;
  for (std::int64_t h = 0; h < heads; ++h) {
    Sum sum(DType::f64);  // over all tokens
    sum += c.before(0, h);
    for (std::int64_t t = 0; t < lse.rows(); ++t) {
      Sum along;
      for (std::int64_t j = 0; j < d; ++j) along += Bounded(d_o(t, h * d + j)) * o(t, h * d + j);
      sum += -exp(Bounded(sinks(h)) - lse(t, h)) * along;
    }
    c.outputs[0].put(h, sum);
  }
}

// --- operands -------------------------------------------------------------------------------------------------------

/// Part `part` of `parts` has the part-th of the query heads and of the key and value heads; where these are fewer,
/// neighbours have the same. use(column of the part, column of the whole row).
template <class Use>
void each_column(const OracleCall& c, std::int64_t part, std::int64_t parts, Use&& use) {
  const Heads n = heads_of(c);
  const std::int64_t a = n.a / parts, k = std::max<std::int64_t>(1, n.k / parts), first = part * n.k / parts;
  for (std::int64_t j = 0; j < a * n.d; ++j) use(j, part * a * n.d + j);
  for (std::int64_t j = 0; n.k > 0 && j < k * n.d; ++j) use(a * n.d + j, n.key(first) + j);
  for (std::int64_t j = 0; n.k > 0 && j < k * n.v; ++j) use((a + k) * n.d + j, n.value(first) + j);
}
void split_heads_formula(OracleCall& c) {
  const Numbers& x = c.inputs[0];
  const std::int64_t parts = c.outputs[0].shape[0], T = x.rows();
  for (std::int64_t part = 0; part < parts; ++part)
    each_column(c, part, parts, [&](std::int64_t of_part, std::int64_t of_row) {
      for (std::int64_t t = 0; t < T; ++t) c.outputs[0](part * T + t, of_part) = x(t, of_row);
    });
}
void merge_heads_formula(OracleCall& c) {
  Wanted& x = c.outputs[0];
  const std::int64_t parts = c.inputs[0].extent(0), T = x.rows();
  std::vector<Sum> sums(x.numbers.size());
  for (std::int64_t part = 0; part < parts; ++part)
    each_column(c, part, parts, [&](std::int64_t of_part, std::int64_t of_row) {
      for (std::int64_t t = 0; t < T; ++t)
        sums[static_cast<std::size_t>(t * x.cols() + of_row)] += c.inputs[0](part * T + t, of_part);
    });
  for (std::size_t i = 0; i < sums.size(); ++i) x.put(static_cast<std::int64_t>(i), sums[i]);
}
void take_kv_formula(OracleCall& c) {
  const Numbers& x = c.inputs[0];
  const Heads n = heads_of(c);
  for (std::int64_t t = 0; t < x.rows(); ++t)
    for (std::int64_t j = 0; j < c.outputs[0].cols(); ++j) c.outputs[0](t, j) = x(t, n.key(0) + j);
}
void merge_qkv_formula(OracleCall& c) {
  const Numbers &q = c.inputs[0], &kv = c.inputs[1];
  for (std::int64_t t = 0; t < q.rows(); ++t) {
    for (std::int64_t j = 0; j < q.cols(); ++j) c.outputs[0].put(t, j, q(t, j));
    for (std::int64_t j = 0; j < kv.cols(); ++j)
      c.outputs[0].put(t, q.cols() + j, Bounded(kv(t, j)) + (c.inputs.size() > 2 ? c.inputs[2](t, j) : 0.0));
  }
}
void latent_heads_formula(OracleCall& c) {
  const Heads n = heads_of(c);
  const std::int64_t shared = c.op.integer(Attr::rope_dim), own = n.d - shared;
  const Numbers &q = c.inputs[0], &kv = c.inputs[1], &s = c.inputs[2];
  for (std::int64_t t = 0; t < q.rows(); ++t) {
    for (std::int64_t j = 0; j < q.cols(); ++j) c.outputs[0](t, j) = q(t, j);
    for (std::int64_t h = 0; h < n.a; ++h) {
      for (std::int64_t j = 0; j < own; ++j) c.outputs[0](t, n.key(h) + j) = kv(t, h * (own + n.v) + j);
      for (std::int64_t j = 0; j < shared; ++j) c.outputs[0](t, n.key(h) + own + j) = s(t, j);
      for (std::int64_t j = 0; j < n.v; ++j) c.outputs[0](t, n.value(h) + j) = kv(t, h * (own + n.v) + own + j);
    }
  }
}
void latent_heads_backward_formula(OracleCall& c) {
  const Heads n = heads_of(c);
  const std::int64_t shared = c.op.integer(Attr::rope_dim), own = n.d - shared;
  const Numbers& dx = c.inputs[0];
  for (std::int64_t t = 0; t < dx.rows(); ++t) {
    for (std::int64_t j = 0; j < n.a * n.d; ++j) c.outputs[0](t, j) = dx(t, j);
    for (std::int64_t h = 0; h < n.a; ++h) {
      for (std::int64_t j = 0; j < own; ++j) c.outputs[1](t, h * (own + n.v) + j) = dx(t, n.key(h) + j);
      for (std::int64_t j = 0; j < n.v; ++j) c.outputs[1](t, h * (own + n.v) + own + j) = dx(t, n.value(h) + j);
    }
    for (std::int64_t j = 0; j < shared; ++j) {
      Sum sum;
      for (std::int64_t h = 0; h < n.a; ++h) sum += dx(t, n.key(h) + own + j);
      c.outputs[2].put(t, j, sum);
    }
  }
}

}  // namespace

std::span<const NamedFormula> attention_formulas() {
  static constexpr NamedFormula all[] = {{OpKind::attention, attention_formula},
                                         {OpKind::attention_backward, attention_backward_formula},
                                         {OpKind::context_attention, context_attention_formula},
                                         {OpKind::context_attention_backward, context_attention_backward_formula},
                                         {OpKind::kv_write, kv_write_formula},
                                         {OpKind::paged_attention, paged_attention_formula},
                                         {OpKind::latent_write, latent_write_formula},
                                         {OpKind::latent_attention, latent_attention_formula},
                                         {OpKind::attention_sinks, attention_sinks_formula},
                                         {OpKind::attention_sinks_backward, attention_sinks_backward_formula},
                                         {OpKind::split_heads, split_heads_formula},
                                         {OpKind::merge_heads, merge_heads_formula},
                                         {OpKind::take_kv, take_kv_formula},
                                         {OpKind::merge_qkv, merge_qkv_formula},
                                         {OpKind::latent_heads, latent_heads_formula},
                                         {OpKind::latent_heads_backward, latent_heads_backward_formula}};
  return all;
}

}  // namespace hotbunk::conformance
