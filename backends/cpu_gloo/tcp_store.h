// Where ranks meet: a small key-value store served by rank 0, which also watches the connections of all ranks
// (death_watch.h).
//
// One kind of message on every connection: type, key, value. Store: set, get (answered when the key is there), add.
// Watch: a rank says hello, phase, failure, goodbye; the server says who died, and when all have left.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace hotbunk {

enum class Message : std::uint8_t {
  set = 'S',
  get = 'G',
  add = 'A',
  value = 'V',  // store
  hello = 'H',
  phase = 'P',
  failure = 'F',
  goodbye = 'Q',
  died = 'D',
  all_left = 'L'
};  // watch

struct Frame {
  Message type{};
  std::string key, value;
};

/// Sends the whole frame; false when the connection is gone.
bool send_frame(int fd, Message type, std::string_view key, std::string_view value);
/// Cuts the first whole frame off `input`; false when there is none yet. Throws RuntimeFailure on garbage.
bool take_frame(std::string& input, Frame& frame);

/// Connects to host:port, again and again until it listens or `seconds` are over (then RuntimeFailure says what
/// failed).
int connect_to(const std::string& host, int port, double seconds);
/// Our own numeric address on that connection.
std::string local_address(int fd);

class TcpStoreServer {
 public:
  /// listen_fd ≥ 0: an inherited listening socket; else listens on the port, on all addresses (RuntimeFailure if
  /// taken).
  TcpStoreServer(int listen_fd, int port, int world_size);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

 private:
  struct Connection {
    int fd = -1;
    std::string input;
    int watched_rank = -1;
  };
  struct Watched {
    std::string pid, phase;
    bool dead = false, left = false;
  };

  void run();
  bool read_from(Connection&);  // false: closed
  void handle(Connection&, const Frame&);
  void put(const std::string& key, std::string value);
  void note_death(int rank, const std::string& reason);

  int listen_fd_, stop_fd_;
  std::vector<Connection> connections_;
  std::map<std::string, std::string> values_;
  std::multimap<std::string, int> waiting_;  // key -> connection that asked for it
  std::vector<Watched> ranks_;
  std::thread thread_;
};

/// One rank's connection to the store. Thread-safe; get blocks the others.
class TcpStore {
 public:
  TcpStore(const std::string& host, int port, double connect_seconds);
  ~TcpStore();
  TcpStore(const TcpStore&) = delete;
  TcpStore& operator=(const TcpStore&) = delete;

  int fd() const { return fd_; }
  /// Called while waiting, ten times a second, and when the connection broke (broken: somebody died or is about to be
  /// known dead); throws to give up with a better reason.
  void set_interrupt(std::function<void(bool broken)> interrupt) { interrupt_ = std::move(interrupt); }

  void set(std::string_view key, std::string_view value);
  /// Waits for the key. RuntimeFailure after `seconds`.
  std::string get(std::string_view key, double seconds);
  /// Adds to a counter that starts at 0, returns the sum.
  std::int64_t add(std::string_view key, std::int64_t delta);

 private:
  std::string wait_value(std::string_view key, double seconds);
  void send(Message, std::string_view key, std::string_view value);
  [[noreturn]] void fail_broken();

  int fd_;
  std::mutex mutex_;
  std::string input_;
  std::function<void(bool)> interrupt_;
};

}  // namespace hotbunk
