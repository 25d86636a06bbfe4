// Rank 0's service to all ranks: the store's values, and the watch over the ranks' connections. Who does not know the
// run's token gets neither: it is told why and hung up on, and holds no more than a descriptor for a few seconds.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "runtime/wire.h"

namespace hotbunk {

struct StoreOptions {
  int listen_fd = -1;  // an inherited listening socket; -1: listen_on(at)
  Meeting at;
  int world_size = 1;
  double speak_seconds = 10.0;                        // a connection that has not said the token by then is closed
  std::size_t most_strangers = 64;                    // of them at once; the oldest go first
  std::size_t stored_bytes = std::size_t{256} << 20;  // all keys and values
};

class TcpStoreServer {
 public:
  explicit TcpStoreServer(StoreOptions);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    int fd = -1;
    std::string input, address;
    bool admitted = false;
    int watched_rank = -1;
    Clock::time_point since;
  };
  struct Watched {
    std::string pid, phase;
    bool seen = false, dead = false, left = false;
  };

  void run();
  void accept_one();
  void drop_silent();
  /// Closes what has ended or is refused.
  void serve(Connection&);
  bool read_from(Connection&, int& error);  // false: closed, with errno or 0
  void refuse(Connection&, const std::string& why);
  void admit(Connection&, const Frame&);
  void handle(Connection&, const Frame&);
  void hello(Connection&, const Frame&);
  void relay(const Connection& from, const Frame&);
  void add(const Connection&, const Frame&);
  void put(const std::string& key, std::string value);
  void note_death(int rank, const std::string& how, const std::string& reason);
  const Connection* watched(int rank) const;
  int rank_named(const std::string& text) const;  // RuntimeFailure where there is none

  StoreOptions options_;
  int listen_fd_, stop_fd_;
  std::vector<Connection> connections_;
  std::map<std::string, std::string> values_;
  std::size_t stored_bytes_ = 0;
  std::multimap<std::string, int> waiting_;  // key -> connection that asked for it
  std::vector<Watched> ranks_;
  bool out_of_files_ = false;
  std::thread thread_;
};

}  // namespace hotbunk
