// All ranks of a run and how they meet. A backend's own world (CpuWorld) adds its communicators.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/communicator.h"
#include "runtime/death_watch.h"
#include "runtime/launch.h"

namespace hotbunk {

class TcpStore;
class TcpStoreServer;

struct WorldOptions {
  double connect_seconds = 60.0;    // how long ranks may take to show up
  double timeout_seconds = 600.0;   // a wait may last so long without anybody working for it (stall.h); 0: for ever
  double say_after_seconds = 10.0;  // a wait that lasts so long is reported on stderr
  double unwind_seconds = 5.0;      // see DeathWatchOptions
  bool check_collectives = false;  // over gloo too: compare op, count and dtype across the group before each collective
};

class World {
 public:
  /// A world of one rank: no sockets, no threads.
  explicit World(const WorldOptions& = {});
  /// Meets the other ranks; every rank calls it. Throws RuntimeFailure when they do not show up, or when rank 0 refuses
  /// this rank: another token (LaunchEnv::token), or its number is taken.
  explicit World(const LaunchEnv&, const WorldOptions& = {});
  /// Without leave() before, the others take this rank for dead: that is what an exception should look like to them.
  virtual ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Rank's process runs on this host and may share memory with us.
  bool same_host(int rank) const;
  /// "" when all ranks of the world share memory, else why not; the same answer on every rank.
  std::string why_no_sharing() const;
  DeathWatch& watch() { return *watch_; }
  /// Cores for this rank beside those of its host (cores_of_rank). Every rank calls it, once.
  std::int64_t cores();

  /// A communicator of `ranks` (world ranks, in group order; this rank is one of them) over host memory. Every one of
  /// them calls it, with the same name; a name is used once per group.
  virtual std::unique_ptr<Communicator> communicator(std::span<const int> ranks, std::string_view name) = 0;

  /// Small values for set-up: set once, get waits for it (timeout: connect_seconds). `from`: the ranks that it takes
  /// until it is set, for the report of a long wait.
  void set(std::string_view key, std::string_view value);
  std::string get(std::string_view key, std::vector<int> from = {});
  /// The same of what comes with work: waits as long as the rank works for it (WorldOptions::timeout_seconds).
  std::string await(std::string_view key, int from);
  /// Everyone says `value`; returns what they said, by rank.
  std::vector<std::string> gather(const std::string& key, const std::string& value);
  void barrier(std::string_view name);  // a name is used once

  /// A goodbye: returns when every rank has said it.
  void leave();

 protected:
  const WorldOptions& options() const { return options_; }
  TcpStore& store() { return *store_; }
  /// In a world of one rank: from here on a thread watches this rank's waits for itself (StallWatch).
  void watch_alone();
  /// Everyone in `ranks` says `value`; returns what they said, in that order.
  std::vector<std::string> gather(const std::string& key, const std::string& value, std::span<const int> ranks);
  /// A barrier of these ranks; a key is used once.
  void meet(const std::string& key, std::span<const int> ranks);
  /// "" when these ranks can share memory; the same answer on every rank of this host.
  std::string why_no_sharing(std::span<const int> ranks) const;

 private:
  struct Status;

  std::string get(std::string_view key, std::vector<int> from, double seconds);
  void meet_hosts();
  std::vector<int> everyone() const;

  WorldOptions options_;
  int rank_ = 0, size_ = 1;
  std::vector<std::string> hosts_;       // identity of each rank's host
  std::vector<std::string> no_sharing_;  // why a rank cannot open its host's memory; "" when it can
  std::unique_ptr<Status> status_;
  std::unique_ptr<TcpStoreServer> server_;
  std::unique_ptr<TcpStore> store_;
  std::unique_ptr<DeathWatch> watch_;
};

}  // namespace hotbunk
