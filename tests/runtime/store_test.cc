// The rendezvous port as a stranger finds it: raw sockets that lack the token, lie, say nothing or say too much.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "runtime/store_server.h"
#include "runtime/tcp_store.h"
#include "tests/runtime/ranks.h"

namespace hotbunk {
namespace {

int port_of(int fd) {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.sin_port);
}

/// A server on a port of its own.
struct Service {
  explicit Service(StoreOptions options = {}) {
    options.listen_fd = listen_on("127.0.0.1", 0);
    at = {"127.0.0.1", port_of(options.listen_fd), "secret"};
    options.at = at;
    options.world_size = 3;
    server = std::make_unique<TcpStoreServer>(options);
  }
  int raw() const { return connect_to(at.host, at.port, 10.0); }
  Meeting at;
  std::unique_ptr<TcpStoreServer> server;
};

/// Reads until the other side hangs up (10 s at most): the reason it gave, "still open" when it did not.
std::string farewell(int fd) {
  const timeval patience{10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  std::string input, reason = "no reason";
  char answer[4096];
  for (;;) {
    const ssize_t n = recv(fd, answer, sizeof answer, 0);
    if (n < 0 && errno == EAGAIN) reason = "still open";
    if (n <= 0) break;
    input.append(answer, static_cast<std::size_t>(n));
    for (Frame frame; take_frame(input, frame);)
      if (frame.type == Message::refused) reason = frame.value;
  }
  close(fd);
  return reason;
}

std::string say(const Service& s, Message type, const std::string& key, const std::string& value) {
  const int fd = s.raw();
  send_frame(fd, type, key, value);
  return farewell(fd);
}

/// What a rank's process would do, by hand: let in, then this.
std::string say_inside(const Service& s, Message type, const std::string& key, const std::string& value) {
  const int fd = join(s.at, 10.0);
  send_frame(fd, type, key, value);
  return farewell(fd);
}

TEST_CASE("who does not say the token reads and sets nothing, and is told why", "[store]") {
  Service s;
  TcpStore inside(s.at, 10.0);
  inside.set("key", "value");
  const std::string first = "the first message must say the run's token";
  CHECK(say(s, Message::get, "key", "") == first);
  CHECK(say(s, Message::set, "key", "stolen") == first);
  CHECK(say(s, Message::hello, "1", "1") == first);
  CHECK(say(s, Message::token, "hotbunk", "secrets") == "this rank's HOTBUNK_TOKEN is not rank 0's");
  CHECK(say(s, Message::token, "hotbunk", "secreT") == "this rank's HOTBUNK_TOKEN is not rank 0's");
  CHECK(say(s, Message::token, "hotbunk", "") == "rank 0 has a HOTBUNK_TOKEN, this rank has none");
  CHECK_THAT(say(s, Message::token, "hotbunk", std::string(100'000, 's')), Catch::Contains("and 256 are the most"));
  const int http = s.raw();
  const std::string request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
  CHECK(send(http, request.data(), request.size(), 0) == std::ssize(request));
  CHECK_THAT(farewell(http), Catch::Contains("are the most"));
  CHECK(inside.get("key", 10.0) == "value");
}

TEST_CASE("a rank that was started with another token is told so", "[store]") {
  Service s;
  s.at.token = "other";
  CHECK_THROWS_WITH(TcpStore(s.at, 10.0),
                    Catch::Contains("refuses this rank: this rank's HOTBUNK_TOKEN is not rank 0's"));
}

TEST_CASE("a connection that says nothing, or never comes to an end, is closed", "[store]") {
  StoreOptions options;
  options.speak_seconds = 0.3;
  Service s(options);
  TcpStore inside(s.at, 10.0);
  const int silent = s.raw(), slow = s.raw();
  CHECK(send(slow, "T", 1, 0) == 1);
  CHECK(farewell(silent) == "the run's token was not said within 0 s");
  CHECK(farewell(slow) == "the run's token was not said within 0 s");
  inside.set("key", "value");  // who is let in may be silent
  CHECK(inside.get("key", 10.0) == "value");
}

TEST_CASE("strangers are few at a time: the oldest go, and a rank still comes in", "[store]") {
  StoreOptions options;
  options.most_strangers = 4;
  options.speak_seconds = 1000.0;
  Service s(options);
  std::vector<int> strangers;
  for (int i = 0; i < 20; ++i) strangers.push_back(s.raw());
  for (int i = 0; i < 15; ++i) CHECK(farewell(strangers[i]) == "too many connections have not said the run's token");
  TcpStore inside(s.at, 10.0);
  inside.set("key", "value");
  CHECK(inside.get("key", 10.0) == "value");
  for (int i = 15; i < 20; ++i) close(strangers[i]);
}

TEST_CASE("keys, values and the store have a size", "[store]") {
  StoreOptions options;
  options.stored_bytes = 1000;
  Service s(options);
  TcpStore inside(s.at, 10.0);
  CHECK_THAT(say_inside(s, Message::set, std::string(2000, 'k'), ""), Catch::Contains("a key of 2000 B"));
  // Refused by what the header says, before 5 MiB have come.
  const int fd = join(s.at, 10.0);
  const char header[] = {'S', 0, 0, 0, 1, 0, 0x50, 0, 0};
  CHECK(send(fd, header, sizeof header, 0) == std::ssize(header));
  CHECK_THAT(farewell(fd), Catch::Contains("a value of 5242880 B"));
  CHECK_THAT(say_inside(s, Message::set, "key", std::string(1001, 'v')), Catch::Contains("the store is full"));
  for (int i = 0; i < 1000; ++i) inside.set("same key", std::string(900, 'v'));  // replaced, not gathered
  CHECK(inside.get("same key", 10.0).size() == 900);
}

TEST_CASE("a rank's place is taken once: double and late hellos are refused with the reason", "[store]") {
  Service s;
  const auto hello = [&](const char* rank) {
    const int fd = join(s.at, 10.0);
    send_frame(fd, Message::hello, rank, "4711");
    return fd;
  };
  const int first = hello("1");
  TcpStore inside(s.at, 10.0);
  CHECK(say_inside(s, Message::hello, "1", "4712") ==
        "rank 1 (pid 4711) is here already: two processes were started with one rank");
  close(first);
  std::string late;  // the server may see the new connection before the end of the old one
  for (int i = 0; i < 100 && late.find("was here and is dead") == late.npos; ++i)
    late = say_inside(s, Message::hello, "1", "4712");
  CHECK(late == "rank 1 (pid 4711) was here and is dead: a run is not joined again");
  const int second = hello("2");
  send_frame(second, Message::goodbye, "", "");
  for (int i = 0; i < 100 && late.find("has left") == late.npos; ++i) late = say_inside(s, Message::hello, "2", "4712");
  CHECK(late == "rank 2 (pid 4711) was here and has left");
  close(second);
  CHECK_THAT(say_inside(s, Message::hello, "3", "1"), Catch::Contains("there is no rank \"3\" in a world of 3"));
  CHECK_THAT(say_inside(s, Message::hello, "-1", "1"), Catch::Contains("there is no rank"));
}

TEST_CASE("rank 0 listens where MASTER_ADDR says, and nowhere else", "[store]") {
  const int fd = listen_on("127.0.0.2", 0);
  const int port = port_of(fd);
  close(connect_to("127.0.0.2", port, 10.0));
  CHECK_THROWS_WITH(connect_to("127.0.0.1", port, 0.0), Catch::Contains("Connection refused"));
  CHECK_FALSE(is_public(fd));
  CHECK_THROWS_WITH(listen_on("127.0.0.2", port),
                    Catch::Contains(fmt::format("port {} (MASTER_PORT): Address already in use", port)));
  close(fd);
  CHECK_THROWS_WITH(listen_on("192.0.2.1", 0), Catch::Contains("192.0.2.1 (MASTER_ADDR): no address of this host"));
}

TEST_CASE("too few open files end a rank at once, with the limit", "[store]") {
  const auto start = std::chrono::steady_clock::now();
  const auto result = fork_ranks(2, [](const LaunchEnv& env) {
    const rlimit few{8, 8};
    setrlimit(RLIMIT_NOFILE, &few);
    try {
      CpuWorld world(env);
    } catch (const RuntimeFailure& e) {
      return std::string(e.what()).find("open files, Too many open files: this process may have 8 (ulimit -n)") !=
                     std::string::npos
                 ? 5
                 : 6;
    }
    return 0;
  });
  CHECK(result.ranks[0].exit_code == 5);
  CHECK(result.ranks[1].exit_code == 5);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));  // not the 60 s of the rendezvous
  // Sockets that run out later are no reason to try for a minute either.
  const auto later = fork_ranks(1, [](const LaunchEnv&) {
    const rlimit few{3, 3};
    setrlimit(RLIMIT_NOFILE, &few);
    try {
      connect_to("127.0.0.1", 9, 60.0);
    } catch (const RuntimeFailure& e) {
      return std::string(e.what()).find("this process may have 3 (ulimit -n)") != std::string::npos ? 5 : 6;
    }
    return 0;
  });
  CHECK(later.ranks[0].exit_code == 5);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(50));
}

/// Reads until a message of this kind has come (10 s at most).
std::optional<Frame> next_frame(int fd, Message type) {
  const timeval patience{10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  std::string input;
  char answer[4096];
  for (ssize_t n; (n = recv(fd, answer, sizeof answer, 0)) > 0;) {
    input.append(answer, static_cast<std::size_t>(n));
    for (Frame frame; take_frame(input, frame);)
      if (frame.type == type) return frame;
  }
  return std::nullopt;
}

TEST_CASE("no open file for one more connection: the ranks that are in learn why, and it is let in later", "[store]") {
  // In a process of its own, whose limit and open files are nobody else's.
  const auto result = fork_ranks(1, [](const LaunchEnv&) {
    Service s;
    const int inside = join(s.at, 10.0);
    send_frame(inside, Message::hello, "1", "4711");
    send_frame(inside, Message::get, "key", "");
    TcpStore other(s.at, 10.0);  // stays: a connection that the server closes later would be room for one
    other.set("key", "value");
    RANK_REQUIRE(next_frame(inside, Message::value), "the hello before it has been read");
    const rlimit few{64, 64};
    setrlimit(RLIMIT_NOFILE, &few);
    const int outside = socket(AF_INET, SOCK_STREAM, 0);
    std::vector<int> taken;
    for (int fd; (fd = dup(inside)) >= 0;) taken.push_back(fd);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(s.at.port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    RANK_REQUIRE(connect(outside, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0, "errno {}", errno);
    const auto told = next_frame(inside, Message::died);
    RANK_REQUIRE(told && told->key == "0");
    const std::string reason = "no more connections: Too many open files: this process may have 64 (ulimit -n)";
    RANK_REQUIRE(told->value.find(reason) != std::string::npos, "{}", told->value);
    for (const int fd : taken) close(fd);
    send_frame(outside, Message::token, "hotbunk", "other");
    RANK_REQUIRE(farewell(outside) == "this rank's HOTBUNK_TOKEN is not rank 0's");
    close(inside);
    return 5;
  });
  CHECK(result.ranks[0].exit_code == 5);
}

}  // namespace
}  // namespace hotbunk
