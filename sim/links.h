// Links that several jobs use at the same time: what happens when copies and collectives meet on a port, a network
// card, the spine or a node's memory.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace hotbunk {

using LinkId = std::uint32_t;

/// What a job takes of one link while it proceeds at full rate.
struct Demand {
  LinkId link = 0;
  double fraction = 0.0;   // of the link's capacity, in [0, 1]: bytes over it / (price x capacity); cut to 2^-40
  std::int32_t times = 1;  // alike jobs that this one stands for on this link, all at its rate; at most 2^20
  double bytes = 0.0;      // of each of them, over this link; counted, nothing depends on it
};

/// What a link has carried so far.
struct LinkLoad {
  double bytes = 0.0;
  std::int64_t busy_ns = 0;  // while a job was on it at a rate above 0
  double full_ns = 0.0;      // what its jobs would have kept it busy for alone, at full capacity
  double peak = 0.0;         // the largest part of its capacity in use, in [0, 1], but for instants of no duration
};

/// Max-min sharing. A job alone runs at rate 1 and is done after its price. Jobs that together want more than a link
/// has are slowed: all rates rise together from 0; where a link is full, the jobs on it stay; no rate exceeds 1. So
/// nobody can have more without taking it from one who has no more than he.
///
/// A link can be full only where what its jobs want at rate 1 exceeds it. Jobs on no such link run at rate 1, and cost
/// O(their links); a change on one solves the jobs that are connected with it over such links, once per instant.
///
/// Exact in whole numbers: a rate is counted in 2^-62, cut; work in 2^-62 ns. So a job that was never slowed is done at
/// start + price, and any other late by less than 1 ns, and by what its rates' changes are late, each by less than 1
/// ns. What is less than a millionth of a nanosecond is done. Who joined in which order within an instant changes
/// nothing but the order of taking.
class SharedLinks {
 public:
  LinkId add_link(std::string name);
  const std::string& name(LinkId link) const { return links_[link].name; }
  std::size_t num_links() const { return links_.size(); }

  // Times must not decrease from call to call.

  /// `job`: the caller's number, given back by take_done. Price >= 0. A job without demands shares nothing.
  void join(std::int64_t now_ns, std::uint32_t job, std::int64_t price_ns, std::span<const Demand>);
  /// Removes a job that is done at `now_ns`, the earliest first, ties in the order of joining.
  std::optional<std::uint32_t> take_done(std::int64_t now_ns);
  /// When the next job is done if nobody joins or leaves; nothing when idle. Solves what has changed: to be asked once
  /// when all that happens at an instant has happened.
  std::optional<std::int64_t> next_done_ns();
  std::size_t running() const { return num_running_; }
  /// Of jobs that are over, and of those that run what they have had up to the last call's time.
  const LinkLoad& load(LinkId link) const { return links_[link].load; }

 private:
  __extension__ using Wide = __int128;
  using Slot = std::uint32_t;  // index into jobs_
  static constexpr int capacity_bits = 40, rate_bits = 62;
  static constexpr std::int64_t full_link = std::int64_t{1} << capacity_bits, full_rate = std::int64_t{1} << rate_bits,
                                done_work = full_rate >> 20;  // 2^-20 ns

  struct Use {
    LinkId link;
    std::uint32_t at;     // in the link's users
    std::int64_t amount;  // of full_link, at full rate
  };
  struct Job {
    std::vector<Use> uses;
    std::uint32_t number = 0, version = 0;  // version: of its place in the heap
    std::uint64_t order = 0, seen = 0;      // of joining; by which solution
    std::int64_t rate = 0, next_rate = 0;   // of full_rate; next: while being solved, -1: still rising
    std::int64_t since_ns = 0;              // when `left` held
    Wide left = 0;                          // of the price, ns x full_rate
  };
  struct User {
    Slot job;
    std::uint32_t use;  // in the job's uses
  };
  struct Link {
    std::string name;
    std::vector<User> users;
    std::int64_t wanted = 0;  // by all users at full rate, of full_link
    LinkLoad load;
    Wide used = 0;              // by all users at their rates, of full_link x full_rate
    std::int64_t since_ns = 0;  // when that began
    std::uint64_t seen = 0;     // by which solution
    bool changed = false;       // since the last solution
    std::int64_t rising = 0;    // while being solved: wanted by those whose rate still rises
    Wide free = 0;              //   full_link x full_rate without what the others take
    std::int64_t level = 0;     //   the rate at which it is full if nothing else is
    bool overfull() const { return wanted > full_link; }
  };
  struct Due {
    std::int64_t time_ns;
    std::uint64_t order;
    Slot job;
    std::uint32_t version;
  };
  struct Later {
    bool operator()(const Due& a, const Due& b) const {
      return a.time_ns != b.time_ns ? a.time_ns > b.time_ns : a.order > b.order;
    }
  };

  void go_to(std::int64_t now_ns);
  void use(const Use&, std::int64_t more_rate);
  void mark(LinkId);
  void leave(Slot);
  void solve();
  void collect(LinkId);
  void raise();
  void stop(Slot, std::int64_t rate);
  void set_rate(Slot, std::int64_t rate);
  void schedule(Slot, std::int64_t time_ns);
  void drop_stale();

  std::vector<Link> links_;
  std::vector<Job> jobs_;
  std::vector<Slot> unused_;
  std::vector<Due> heap_;                 // by Later; a job's older versions are stale
  std::vector<LinkId> changed_;           // overfull ones that somebody joined or left since the last solution
  std::vector<LinkId> component_, full_;  // while being solved
  std::vector<Slot> members_;
  std::int64_t now_ns_ = 0;
  std::uint64_t num_joined_ = 0, solution_ = 0;
  std::size_t num_running_ = 0;
};

}  // namespace hotbunk
