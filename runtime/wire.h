// What travels between ranks and the store of rank 0: one kind of message on every connection, and the sockets.
//
// A message is type, key, value. The first one on a connection says the run's token; what comes before the welcome is
// read up to a few hundred bytes only. Store: set, get (answered when the key is there), add. Watch: a rank says hello,
// phase, failure, goodbye; the server says who died, and when all have left. ask and state travel through the server
// from a rank that waits to the one it waits for, and back.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace hotbunk {

enum class Message : std::uint8_t {
  token = 'T',
  welcome = 'W',
  refused = 'R',  // value: why; the connection is closed behind it
  set = 'S',
  get = 'G',
  add = 'A',
  value = 'V',  // store
  hello = 'H',
  phase = 'P',
  failure = 'F',  // key: the rank to blame, "" for the sender
  goodbye = 'Q',
  died = 'D',
  all_left = 'L',
  ask = 'K',   // key: the rank asked; at that rank: who asks
  state = 'I'  // key: the rank that asked; at that rank: who answers
};

struct Frame {
  Message type{};
  std::string key, value;
};

/// Longest fields of a message. A key or value of set-up is small; a stranger's first words are shorter still.
struct FrameLimits {
  std::size_t key_bytes = 1 << 10, value_bytes = 4 << 20;
};
inline constexpr FrameLimits stranger_limits = {.key_bytes = 64, .value_bytes = 256};

/// Sends the whole frame; false when the connection is gone.
bool send_frame(int fd, Message type, std::string_view key, std::string_view value);
/// Cuts the first whole frame off `input`; false when there is none yet. Throws RuntimeFailure on garbage and on fields
/// that are longer than the limits, before they have come.
bool take_frame(std::string& input, Frame& frame, const FrameLimits& = {});

/// A host that vanishes sends no FIN. An idle connection asks after 10 s; what is not acknowledged, or not answered,
/// for 20 s ends the connection at both ends (errno ETIMEDOUT). A process that is only stopped is still acknowledged
/// for by its kernel. Also: no delay of small messages.
void watch_host(int fd);
/// "10.0.0.2 has not answered for 20 s (Connection timed out): that host is gone, or the network to it is cut" for an
/// errno that says so of a connection; "" for others.
std::string host_gone(int error, std::string_view address);

/// Connects to host:port, again and again until it listens or `seconds` are over. RuntimeFailure says what failed; at
/// once when trying again cannot help (no descriptors, no permission).
int connect_to(const std::string& host, int port, double seconds);

/// Where a run meets, and what its ranks know that others do not.
struct Meeting {
  std::string host;
  int port = 0;
  std::string token;
};
/// Connects, says the token and waits to be let in. RuntimeFailure with the reason when refused.
int join(const Meeting&, double seconds);

/// Listens on the address of this host that `host` names, not on others. A name that this host resolves to its loopback
/// (as Debian's /etc/hosts does) tells nothing of how others see it: then on all addresses. RuntimeFailure when the
/// port is taken or no address is of this host.
int listen_on(const std::string& host, int port);
/// Whether a listening socket can be reached from other hosts.
bool is_public(int listen_fd);

/// Numeric addresses of a connection's ends.
std::string local_address(int fd);
std::string peer_address(int fd);

}  // namespace hotbunk
