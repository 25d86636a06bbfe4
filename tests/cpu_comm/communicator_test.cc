// Collectives against the naive definition, both transports bit for bit, counters against closed forms.
#include "runtime/communicator.h"

#include <array>
#include <bit>
#include <catch2/catch.hpp>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "backends/cpu_gloo/arena.h"
#include "base/check.h"
#include "base/rng.h"
#include "runtime/gather.h"
#include "tests/runtime/ranks.h"

namespace hotbunk {
namespace {

using test::with_ranks;

/// Element i of what rank r contributes: fp32 of 20 binary orders of magnitude, so that the sum depends on the order.
float contribution(int rank, std::int64_t i) {
  const std::uint64_t h =
      (static_cast<std::uint64_t>(i) * 4 + static_cast<std::uint64_t>(rank) + 1) * 0x9E3779B97F4A7C15ull;
  return (uniform24(static_cast<std::uint32_t>(h >> 32)) - 0.5f) * static_cast<float>(1u << (h >> 20) % 20);
}

template <class T>
T convert(float x) {
  if constexpr (std::is_same_v<T, bf16>) return to_bf16(x);
  else return static_cast<T>(x);
}

template <class T>
std::vector<T> contributions(int rank, std::int64_t n) {
  std::vector<T> v(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) v[i] = convert<T>(contribution(rank, i));
  return v;
}

/// The slow obvious sum: rank 0 first.
template <class T>
T naive(int world, std::int64_t i, ReduceOp op) {
  const auto widen = [](T x) {
    if constexpr (std::is_same_v<T, bf16>) return to_f32(x);
    else return x;
  };
  auto sum = widen(convert<T>(contribution(0, i)));
  for (int r = 1; r < world; ++r) {
    const auto x = widen(convert<T>(contribution(r, i)));
    sum = op == ReduceOp::sum ? sum + x : std::max(sum, x);
  }
  if constexpr (std::is_same_v<T, bf16>) return to_bf16(sum);
  else return sum;
}

template <class T>
constexpr DType dtype_of = std::is_same_v<T, float>  ? DType::f32
                           : std::is_same_v<T, bf16> ? DType::bf16
                                                     : DType::i32;

template <class T>
bool same_bits(const T& a, const T& b) {
  using Bytes = std::array<std::byte, sizeof(T)>;
  return std::bit_cast<Bytes>(a) == std::bit_cast<Bytes>(b);
}

/// Buffers either in a shared arena (peers read them in place) or in ordinary memory (staged in pieces).
class Memory {
 public:
  Memory(CpuWorld& world, bool in_arena) : arena_({"test", size, size, true}) {
    if (!in_arena) return;
    arena_.map(0, size, "test");
    world.share(arena_);
    next_ = arena_.base();
  }
  template <class T>
  T* take(std::int64_t n) {
    const std::int64_t bytes = (n * static_cast<std::int64_t>(sizeof(T)) + 127) / 64 * 64;  // a gap behind each buffer
    if (next_ == nullptr) {
      heap_.emplace_back(static_cast<std::size_t>(bytes));
      return reinterpret_cast<T*>(heap_.back().data());
    }
    T* p = reinterpret_cast<T*>(next_);
    next_ += bytes;
    RANK_REQUIRE(arena_.contains(next_));
    return p;
  }
  template <class T>
  T* copy_of(const std::vector<T>& v) {
    T* p = take<T>(std::ssize(v));
    std::copy(v.begin(), v.end(), p);
    return p;
  }

 private:
  static constexpr std::int64_t size = 64 << 20;
  Arena arena_;
  std::byte* next_ = nullptr;
  std::vector<std::vector<std::byte>> heap_;
};

std::vector<int> everyone(const CpuWorld& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

template <class T>
void check_reductions(Communicator& c, Memory& memory, std::int64_t n) {
  const int w = c.size(), me = c.rank();
  for (ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
    const T* send = memory.copy_of(contributions<T>(me, n));
    T* recv = memory.take<T>(n);
    c.all_reduce(send, recv, n, dtype_of<T>, op);
    T* in_place = memory.copy_of(contributions<T>(me, n));
    c.all_reduce(in_place, in_place, n, dtype_of<T>, op);
    for (std::int64_t i = 0; i < n; ++i) {
      RANK_REQUIRE(same_bits(recv[i], naive<T>(w, i, op)), "all_reduce [{}] of {}", i, n);
      RANK_REQUIRE(same_bits(in_place[i], recv[i]), "in place [{}] of {}", i, n);
    }
  }
  const T* send = memory.copy_of(contributions<T>(me, w * n));
  T* recv = memory.take<T>(n);
  c.reduce_scatter(send, recv, n, dtype_of<T>);
  T* in_place = memory.copy_of(contributions<T>(me, w * n));
  c.reduce_scatter(in_place, in_place + me * n, n, dtype_of<T>);
  for (std::int64_t i = 0; i < n; ++i) {
    RANK_REQUIRE(same_bits(recv[i], naive<T>(w, me * n + i, ReduceOp::sum)), "reduce_scatter [{}] of {}", i, n);
    RANK_REQUIRE(same_bits(in_place[me * n + i], recv[i]), "in place [{}] of {}", i, n);
  }
}

void check_copies(Communicator& c, Memory& memory, std::int64_t n) {
  using T = std::int32_t;
  const int w = c.size(), me = c.rank();
  const auto value = [](int rank, std::int64_t i) { return static_cast<T>(rank * 1'000'003 + i); };
  T* send = memory.take<T>(w * n);
  for (std::int64_t i = 0; i < w * n; ++i) send[i] = value(me, i);
  T* recv = memory.take<T>(w * n);

  c.all_gather(send, recv, n * 4);
  for (int r = 0; r < w; ++r)
    for (std::int64_t i = 0; i < n; ++i) RANK_REQUIRE(recv[r * n + i] == value(r, i), "all_gather of {}", n);
  for (std::int64_t i = 0; i < n; ++i) recv[me * n + i] = value(me, 5 * i);
  c.all_gather(recv + me * n, recv, n * 4);  // in place
  for (int r = 0; r < w; ++r)
    for (std::int64_t i = 0; i < n; ++i)
      RANK_REQUIRE(recv[r * n + i] == value(r, 5 * i), "in-place all_gather of {}", n);

  c.all_to_all(send, recv, n * 4);
  for (int r = 0; r < w; ++r)
    for (std::int64_t i = 0; i < n; ++i) RANK_REQUIRE(recv[r * n + i] == value(r, me * n + i), "all_to_all of {}", n);

  for (int root = 0; root < w; ++root) {
    for (std::int64_t i = 0; i < n; ++i) recv[i] = me == root ? value(root, 3 * i) : -1;
    c.broadcast(recv, n * 4, root);
    for (std::int64_t i = 0; i < n; ++i)
      RANK_REQUIRE(recv[i] == value(root, 3 * i), "broadcast of {} from {}", n, root);
  }

  // Rank s sends (s + 2 d) mod 5 elements to rank d, some of them none.
  const auto elements = [](int s, int d) { return std::int64_t{(s + 2 * d) % 5}; };
  std::vector<std::int64_t> out, in;
  for (int r = 0; r < w; ++r) {
    out.push_back(elements(me, r) * n * 4 / 5 / 4 * 4);
    in.push_back(elements(r, me) * n * 4 / 5 / 4 * 4);
  }
  c.all_to_all_v(send, out, recv, in);
  for (int r = 0, at = 0; r < w; ++r) {
    std::int64_t theirs = 0;
    for (int d = 0; d < me; ++d) theirs += elements(r, d) * n * 4 / 5 / 4;
    for (std::int64_t i = 0; i < in[r] / 4; ++i)
      RANK_REQUIRE(recv[at + i] == value(r, theirs + i), "all_to_all_v from {}", r);
    at += static_cast<int>(in[r] / 4);
  }

  // The same with parts that lie anywhere: sent from behind one another's end backwards, received with a gap of one
  // element, which stays as it is.
  std::vector<CommPart> leaving, arriving;
  T* apart = memory.take<T>(w * (n + 1));
  std::int64_t left = 0, gap = 1;
  for (int r = 0; r < w; ++r) left += out[r];
  for (int r = 0; r < w; ++r) {
    left -= out[r];
    leaving.push_back({left, out[r]});
    apart[gap - 1] = -7;
    arriving.push_back({gap * 4, in[r]});
    gap += in[r] / 4 + 1;
  }
  c.all_to_all_v(send, leaving, apart, arriving);
  for (int r = 0; r < w; ++r) {
    std::int64_t theirs = 0;  // behind what it sends to the ranks above this one
    for (int d = me + 1; d < w; ++d) theirs += elements(r, d) * n * 4 / 5 / 4;
    const std::int64_t at = arriving[r].begin / 4;
    RANK_REQUIRE(apart[at - 1] == -7, "all_to_all_v writes in front of what comes from {}", r);
    for (std::int64_t i = 0; i < in[r] / 4; ++i)
      RANK_REQUIRE(apart[at + i] == value(r, theirs + i), "all_to_all_v of parts from {}", r);
  }

  c.send_recv(me, send, n * 4, me, recv, n * 4);  // a ring of one
  for (std::int64_t i = 0; i < n; ++i) RANK_REQUIRE(recv[i] == value(me, i), "send_recv of {} to itself", n);
  if (w > 1) {
    const int next = (me + 1) % w, previous = (me + w - 1) % w;
    c.send_recv(next, send, n * 4, previous, recv, n * 4);
    for (std::int64_t i = 0; i < n; ++i) RANK_REQUIRE(recv[i] == value(previous, i), "send_recv of {}", n);
    // Its halves meet a send and a recv: rank 0 only sends, the last only receives, those between do both at once.
    if (me == 0) c.send(1, send, n * 4);
    else if (me + 1 == w) c.recv(me - 1, recv, n * 4);
    else c.send_recv(me + 1, send, n * 4, me - 1, recv, n * 4);
    if (me > 0)
      for (std::int64_t i = 0; i < n; ++i) RANK_REQUIRE(recv[i] == value(me - 1, i), "a chain of {}", n);
    for (int from = 0; from + 1 < w; ++from) {
      if (me == from) c.send(from + 1, send + n, n * 4);
      if (me == from + 1) c.recv(from, recv, n * 4);
      if (me == from + 1)
        for (std::int64_t i = 0; i < n; ++i) RANK_REQUIRE(recv[i] == value(from, n + i), "send of {}", n);
    }
  }
}

void check_everything(CpuWorld& world, Transport transport, bool in_arena) {
  Memory memory(world, in_arena);
  const auto c = world.communicator(everyone(world), fmt::format("{}{}", name_of(transport), in_arena), transport);
  RANK_REQUIRE(c->transport() == (world.size() == 1 ? Transport::solo : transport));
  // 0; odd; below and above the limit of copying eagerly (64 KiB); many staging pieces of 1 MiB, the last one partial.
  for (std::int64_t n : {0, 1, 7, 4097, 20'011, 300'007}) {
    check_reductions<float>(*c, memory, n);
    if (n > 30'000) continue;  // one dtype is enough for the long way through the pieces
    check_reductions<bf16>(*c, memory, n);
    check_reductions<std::int32_t>(*c, memory, n);
    check_copies(*c, memory, n);
  }
  check_copies(*c, memory, 300'007);
  c->barrier();
}

TEST_CASE("collectives equal their definition, bit for bit, over both transports", "[comm]") {
  const int w = GENERATE(1, 2, 3, 4);
  const auto result = with_ranks(w, [](CpuWorld& world) {
    if (world.size() <= 3) check_everything(world, Transport::shm, false);
    check_everything(world, Transport::shm, true);
    check_everything(world, Transport::gloo, false);
  });
  INFO(result.message);
  CHECK(result.exit_code == 0);
}

TEST_CASE("an arena buffer here, ordinary memory there: transports mix", "[comm]") {
  const auto result = with_ranks(3, [](CpuWorld& world) {
    Arena arena({"test", 16 << 20, 16 << 20, true});
    arena.map(0, 16 << 20, "test");
    world.share(arena);
    const auto c = world.communicator(everyone(world), "mixed");
    const std::int64_t n = 700'001;  // 2.8 MB: three pieces where staged
    std::vector<float> heap = contributions<float>(world.rank(), n), summed(n);
    float* send = heap.data();
    if (world.rank() == 1) {
      send = reinterpret_cast<float*>(arena.base());
      std::copy(heap.begin(), heap.end(), send);
    }
    c->all_reduce(send, summed.data(), n, DType::f32);
    for (std::int64_t i = 0; i < n; ++i)
      RANK_REQUIRE(same_bits(summed[i], naive<float>(3, i, ReduceOp::sum)), "[{}]", i);

    // A root with its buffer in an arena writes a part of what ranks 0 and 1 receive, and nothing beside it; of rank
    // 2's buffer it cannot, and from rank 2's others read pieces.
    std::vector<std::int32_t> ordinary(static_cast<std::size_t>(n + 2));
    std::int32_t* received =
        world.rank() == 2 ? ordinary.data() : reinterpret_cast<std::int32_t*>(arena.base() + (8 << 20));
    for (int root = 0; root < 3; ++root) {
      for (std::int64_t i = 0; i < n + 2; ++i) received[i] = -7 - world.rank();
      if (world.rank() == root) std::iota(received + 1, received + 1 + n, root);
      c->broadcast(received + 1, n * 4, root);
      for (std::int64_t i = 0; i < n; ++i) RANK_REQUIRE(received[1 + i] == root + i, "broadcast [{}] from {}", i, root);
      RANK_REQUIRE(received[0] == -7 - world.rank() && received[n + 1] == -7 - world.rank(), "beside it, from {}",
                   root);
    }
  });
  INFO(result.message);
  CHECK(result.exit_code == 0);
}

TEST_CASE("two communicators of one group on two streams do not interfere", "[comm]") {
  const Transport transport = GENERATE(Transport::shm, Transport::gloo);
  const auto result = with_ranks(2, [&](CpuWorld& world) {
    const auto a = world.communicator(everyone(world), "a", transport),
               b = world.communicator(everyone(world), "b", transport);
    const auto work = [&](Communicator& c, int rounds, std::int64_t n) {
      const std::vector<float> send = contributions<float>(world.rank(), n);
      std::vector<float> recv(static_cast<std::size_t>(n));
      for (int i = 0; i < rounds; ++i) {
        c.all_reduce(send.data(), recv.data(), n, DType::f32);
        for (std::int64_t k = 0; k < n; k += 101) RANK_REQUIRE(same_bits(recv[k], naive<float>(2, k, ReduceOp::sum)));
      }
    };
    std::exception_ptr other;
    std::thread t([&] {  // different counts and sizes, in an order that is nobody's
      try {
        work(*a, 40, 3'001);
      } catch (...) {
        other = std::current_exception();
      }
    });
    work(*b, 7, 100'003);
    t.join();
    if (other) std::rethrow_exception(other);
  });
  INFO(result.message);
  CHECK(result.exit_code == 0);
}

TEST_CASE("subgroups, in an order of their own", "[comm]") {
  const auto result = with_ranks(4, [](CpuWorld& world) {
    const std::vector<int> group = world.rank() % 2 == 0 ? std::vector{2, 0} : std::vector{1, 3};
    const auto c = world.communicator(group, "pair");
    RANK_REQUIRE(c->rank() == (group[0] == world.rank() ? 0 : 1));
    int got[2];
    const int me = world.rank();
    c->all_gather(&me, got, sizeof me);
    RANK_REQUIRE(got[0] == group[0] && got[1] == group[1]);
  });
  INFO(result.message);
  CHECK(result.exit_code == 0);
}

TEST_CASE("texts of any length come whole to all, or to the first rank alone", "[comm]") {
  const auto text_of = [](int rank) {  // the longest, none, a piece to the byte, and one that ends within a piece
    const std::size_t sizes[] = {3'500'000, 0, 1 << 20, 1'500'000};
    std::string text(sizes[rank], '\0');
    for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 31 + i / 1000 + rank);
    return text;
  };
  const auto result = with_ranks(4, [&](CpuWorld& world) {
    const std::string mine = text_of(world.rank());
    const auto all = gather_strings(world, "all", mine);
    RANK_REQUIRE(all.size() == 4);
    for (int r = 0; r < 4; ++r) RANK_REQUIRE(all[static_cast<std::size_t>(r)] == text_of(r));
    const auto first = gather_strings_at_first(world, "first", mine);
    RANK_REQUIRE(world.rank() == 0 ? first == all : first.empty());
  });
  INFO(result.message);
  CHECK(result.exit_code == 0);
}

TEST_CASE("counters equal the closed forms, by tag", "[comm]") {
  const Transport transport = GENERATE(Transport::shm, Transport::gloo);
  const auto result = with_ranks(3, [&](CpuWorld& world) {
    const auto c = world.communicator(everyone(world), "counted", transport);
    std::vector<float> a(3000), b(3000);
    c->set_tag(5);
    c->all_gather(a.data(), b.data(), 400, 30);  // n = 1200, of which 30 padding; wire 2/3 n = 800
    c->all_gather(a.data(), b.data(), 400);
    c->reduce_scatter(a.data(), b.data(), 100, DType::f32, 8);  // n = 3 * 400 = 1200; wire 800
    c->set_tag(6);
    c->all_reduce(a.data(), b.data(), 300, DType::bf16);  // n = 600; wire 2 * 2/3 * 600 = 800
    c->all_reduce(a.data(), b.data(), 10, DType::f32);  // chunks 4, 4, 2 elements: wire (10 - k + 2 k) * 4 = 56, 56, 48
    c->broadcast(a.data(), 100, 1);                     // chain 1, 2, 0: rank 0 passes nothing on
    c->all_to_all(a.data(), b.data(), 50);              // 150 sent, 50 of them to itself
    // Rank r sends r + 1 bytes to each, and has back 1 + 2 + 3: those are the payload, those to others the wire.
    const std::int64_t each = c->rank() + 1;
    const std::array<std::int64_t, 3> out = {each, each, each}, back = {1, 2, 3};
    c->all_to_all_v(a.data(), out, b.data(), back, true);
    c->barrier();
    if (c->rank() == 0) c->send(2, a.data(), 77);
    if (c->rank() == 2) c->recv(0, a.data(), 77);
    const int r = c->rank();
    const int next = (r + 1) % 3, previous = (r + 2) % 3;
    c->send_recv(next, a.data(), 50 + r, previous, b.data(), 50 + previous, 3);  // others count what comes from them
    c->send_recv(r, a.data(), 10, r, b.data(), 10);                              // over no wire
    std::vector<CommTraffic> expected = {
        {5, CommOp::all_gather, 2, 2370, 30, 1600},
        {5, CommOp::reduce_scatter, 1, 1192, 8, 800},
        {6, CommOp::all_reduce, 2, 640, 0, 800 + (r == 2 ? 48 : 56)},
        {6, CommOp::broadcast, 1, 100, 0, r == 0 ? 0 : 100},
        {6, CommOp::all_to_all, 2, 150 + 6, 0, 100 + 2 * (r + 1)},
    };
    if (r == 0) expected.push_back({6, CommOp::send, 1, 77, 0, 77});
    if (r == 2) expected.push_back({6, CommOp::recv, 1, 0, 0, 0});
    expected.push_back({6, CommOp::send_recv, 2, 60 + r - 3, 3, 50 + r});
    expected.push_back({6, CommOp::barrier, 1, 0, 0, 0});
    RANK_REQUIRE(c->take_traffic() == expected);
  });
  INFO(result.message);
  CHECK(result.exit_code == 0);
}

TEST_CASE("wire volume of an all-reduce is the ring's where the chunks are equal", "[comm]") {
  for (int w : {2, 3, 4, 8})
    for (int r = 0; r < w; ++r) CHECK(all_reduce_wire_bytes(w, r, 24 * 5, 4) == 2 * (w - 1) * 24 * 5 * 4 / w);
  CHECK(all_reduce_wire_bytes(1, 0, 100, 4) == 0);
  // 5 elements over 4 ranks: chunks 2, 2, 1, 0.
  CHECK(all_reduce_wire_bytes(4, 3, 5, 4) == 20);
  CHECK(all_reduce_wire_bytes(4, 0, 5, 4) == (3 + 3 * 2) * 4);
}

TEST_CASE("ranks that disagree are told apart before memory is touched", "[comm]") {
  const Transport transport = GENERATE(Transport::shm, Transport::gloo);
  const int mistake = GENERATE(range(0, 5));
  WorldOptions options;
  options.check_collectives = true;
  const auto result = with_ranks(
      2,
      [&](CpuWorld& world) {
        const auto c = world.communicator(everyone(world), "fsdp", transport);
        std::vector<float> a(2000, 1.0f), b(2000, 2.0f);
        c->barrier();
        std::string message;
        const bool odd = world.rank() == 1;
        try {
          if (mistake == 0) c->all_gather(a.data(), b.data(), odd ? 404 : 400);
          if (mistake == 1) odd ? c->all_gather(a.data(), b.data(), 400) : c->broadcast(a.data(), 400, 0);
          if (mistake == 2) c->all_reduce(a.data(), b.data(), 100, odd ? DType::bf16 : DType::f32);
          if (mistake == 3) c->broadcast(b.data(), 400, world.rank());
          if (mistake == 4) {
            const std::int64_t out[2] = {40, 40}, in[2] = {odd ? 44 : 40, 40};
            c->all_to_all_v(a.data(), out, b.data(), in);
          }
        } catch (const RuntimeFailure& e) {
          message = e.what();
        }
        if (mistake < 4) {
          RANK_REQUIRE(
              message.find("#2 of group fsdp (ranks 0, 1) does not agree across the group") != std::string::npos, "{}",
              message);
          RANK_REQUIRE(message.find("rank 0 calls ") != std::string::npos &&
                           message.find("; rank 1 calls ") != std::string::npos,
                       "{}", message);
        }
        if (mistake == 0)
          RANK_REQUIRE(message.find("rank 1 calls all_gather #2 of 404 uint8") != std::string::npos, "{}", message);
        if (mistake == 4)
          RANK_REQUIRE(message.find("rank 0 sends 40 B to rank 1, which expects 44") != std::string::npos, "{}",
                       message);
        for (int i = 202; i < 2000; ++i) RANK_REQUIRE(b[i] == 2.0f, "[{}]", i);  // beyond what was legal to write
      },
      options);
  INFO(result.message);
  CHECK(result.exit_code == 0);
}

TEST_CASE("a message of another size is refused by the receiver", "[comm]") {
  const auto result = with_ranks(2, [](CpuWorld& world) {
    const auto c = world.communicator(everyone(world), "pair", Transport::shm);
    std::vector<char> data(100, 'x');
    if (c->rank() == 0) {
      c->send(1, data.data(), 90);
    } else {
      std::string message;
      try {
        c->recv(0, data.data(), 100);
      } catch (const RuntimeFailure& e) {
        message = e.what();
      }
      RANK_REQUIRE(message == "recv of 100 B from rank 0 in group pair: 100 B expected, but 90 B are sent", "{}",
                   message);
    }
  });
  INFO(result.message);
  CHECK(result.exit_code == 0);
}

TEST_CASE("peers read shared memory without its owner's help", "[comm]") {
  const auto result = with_ranks(2, [](CpuWorld& world) {
    Arena first({"first", 1 << 20, 1 << 20, true}), second({"second", 1 << 20, 1 << 20, true});
    for (Arena* a : {&first, &second}) a->map(0, 8192, "test");
    RANK_REQUIRE(world.share(first) == 0);
    RANK_REQUIRE(world.share(second) == 1);
    const auto c = world.communicator(everyone(world), "peers");
    std::memset(second.at(4096), 'a' + world.rank(), 100);
    c->barrier();
    const int peer = 1 - world.rank();
    const std::byte expected{static_cast<unsigned char>('a' + peer)};
    RANK_REQUIRE(*c->peer_pointer(peer, 1, 4096) == expected);
    RANK_REQUIRE(*world.peer_pointer(peer, 1, 4195) == expected);
    RANK_REQUIRE(*c->peer_pointer(peer, 0, 4096) == std::byte{0});
    RANK_REQUIRE(c->peer_pointer(peer, 2, 0) == nullptr);
    std::byte got[100];
    c->peer_read(peer, 1, 4096, got, 100);
    RANK_REQUIRE(got[99] == expected);
    RANK_REQUIRE(c->take_traffic().at(0) == (CommTraffic{0, CommOp::peer_read, 1, 100, 0, 0}));
    c->barrier();
    // Unmapped and mapped again by its owner: the peer sees the new contents at the same place, behind what it had.
    second.unmap(4096, 8192);
    second.map(4096, 8192, "again");
    std::memset(second.at(4096), 'x', 1);
    c->barrier();
    RANK_REQUIRE(*c->peer_pointer(peer, 1, 4096) == std::byte{'x'});
    RANK_REQUIRE(*c->peer_pointer(peer, 1, 4097) == expected);
    RANK_REQUIRE(second.resident_bytes() == 8192);
    c->barrier();
    const auto tcp = world.communicator(everyone(world), "tcp", Transport::gloo);
    bool refused = false;
    try {
      tcp->peer_read(peer, 0, 0, got, 1);
    } catch (const RuntimeFailure&) {
      refused = true;
    }
    RANK_REQUIRE(refused);
  });
  INFO(result.message);
  CHECK(result.exit_code == 0);
}

/// Of the whole process, as the kernel counts by walking its pages.
std::int64_t resident_bytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string line; std::getline(rollup, line);)
    if (line.starts_with("Rss:")) return std::stoll(line.substr(4)) * 1024;
  return 0;
}

TEST_CASE("peers find pieces of a file where their owner's addresses are, and forget what they have read", "[comm]") {
  const auto result = with_ranks(2, [](CpuWorld& world) {
    constexpr std::int64_t mib = 1 << 20;
    Arena arena({.name = "pieces",
                 .reserve_bytes = 48 * mib,
                 .capacity_bytes = 48 * mib,
                 .shared = true,
                 .pieces = {{0, 16 * mib, 16 * mib}, {16 * mib, 32 * mib, 0}, {32 * mib, 48 * mib, 16 * mib}}});
    world.share(arena);
    const auto c = world.communicator(everyone(world), "pieces");
    const int peer = 1 - world.rank();
    const auto write_and_read = [&](std::int64_t begin) {
      arena.map(begin, begin + 16 * mib, "test");
      const auto value = [&](int rank) { return static_cast<unsigned char>(begin / mib + rank); };
      std::memset(arena.at(begin), value(world.rank()), 16 * mib);
      c->barrier();
      const std::byte* p = world.peer_pointer(peer, 0, begin);
      RANK_REQUIRE(std::all_of(p, p + 16 * mib, [&](std::byte b) { return b == std::byte{value(peer)}; }), "from {} on",
                   begin);
      c->barrier();
    };
    write_and_read(0);
    write_and_read(16 * mib);
    const std::int64_t read = resident_bytes();
    arena.unmap(0, 16 * mib);
    world.forget_peers();
    const std::int64_t left = resident_bytes();
    RANK_REQUIRE(read - left >= 47 * mib, "{} B resident before, {} B after", read, left);
    c->barrier();
    write_and_read(32 * mib);  // where the first piece was
    RANK_REQUIRE(arena.file_bytes() == 32 * mib);
  });
  INFO(result.message);
  CHECK(result.exit_code == 0);
}

}  // namespace
}  // namespace hotbunk
