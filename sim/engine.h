// The discrete-event engine: streams of all ranks in virtual time. It knows durations, order and who meets whom, and
// nothing else of what an op means.
//
// A rank's host is a program that enqueues in its total order, at most `queue_depth` ops ahead of what has finished
// (as every real queue is bounded). That bound is part of the semantics: it tells the engine how far it may advance
// while a rank has not said yet what it does next, so that the result does not depend on how the walk interleaves its
// calls, and it keeps the memory of a long run small.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/diagnostic.h"
#include "sim/cluster_links.h"
#include "sim/event_queue.h"
#include "sim/program_index.h"
#include "sim/run_queue.h"
#include "sim/sharing.h"
#include "sim/timeline.h"

namespace hotbunk {

struct EngineOptions {
  std::int64_t ranks_per_device = 1;
  std::int64_t device_slots = 1;  // ops that run at their full rate on one device at the same time
  std::int64_t link_slots = 1;    // copies, per direction of a device's link
  std::int64_t queue_depth = std::int64_t{1} << 14;
  ThreadModel threads;  // with cores, what shares a device's compute, links and host shares its cores instead
};

class Engine {
 public:
  /// `index`: how each rank that is played is cut, by rank; all of it outlives the engine.
  Engine(const Plan&, const RankClasses&, std::vector<const ProgramIndex*> index, Timeline&, const EngineOptions&);

  /// From now on copies, collectives and sends share the cluster's links; without it only ranks of one device share its
  /// two directions. While a device communicates, its kernels run slower by the model's overlap_slowdown; prices of a
  /// priced plan have that in them already. Not where streams are threads. The model outlives the engine.
  void use_links(const CostModel&, const ClusterSpec&, std::span<const RankFactors> slow = {});

  void enqueue_op(Rank, StreamId, std::uint32_t op, std::uint32_t run, std::int64_t duration_ns);
  void enqueue_record(Rank, StreamId, EventId);
  /// For the most recent record of the event; nothing when there was none.
  void enqueue_wait(Rank, StreamId, EventId);
  /// The rank's host launches so many ops beside its streams, one behind the other: it is not through before. With
  /// use_links() alone, and nothing of a priced plan, whose prices have that in them already.
  void enqueue_launches(Rank, std::uint32_t run, std::int64_t ops);
  /// The rank's host thread is busy so long before its next call; nothing where streams are not threads.
  void enqueue_host_work(Rank, std::int64_t duration_ns);
  /// The rank's host goes on with this visit of a phase; nothing where streams are not threads.
  void enqueue_enter(Rank, std::uint32_t visit);
  /// The open memory events get the time when the stream has come here.
  void enqueue_memory(Rank, StreamId, Timeline::OpenEvents);
  /// What the rank enqueues later starts when all that it enqueued so far is done.
  void enqueue_sync(Rank);

  /// Runs as far as what is enqueued determines. E610 mismatch, E611 deadlock; then nothing moves any more.
  Status advance() { return run(false); }
  /// Runs to the end: nothing more will come.
  Status finish() { return run(true); }

  /// What the links carried; empty without use_links().
  std::vector<LinkTraffic> link_traffic() const {
    return wiring_ ? wiring_->cluster.traffic(classes_.representatives()) : std::vector<LinkTraffic>{};
  }

  std::int64_t now_ns() const { return now_; }
  /// Ops that have been completed.
  std::int64_t num_done() const { return num_done_; }
  /// Entries held at most at the same time, all ranks: what bounds the engine's memory.
  std::int64_t peak_entries() const { return peak_entries_; }

 private:
  using QueueId = std::uint32_t;  // rank * max_streams + stream
  // Upper bits of SimEvent::what: what is done. Resources are followed by the devices' cores, or by the links.
  static constexpr std::uint32_t resources_per_device = 3;  // compute, h2d, d2h
  static constexpr std::uint32_t tag_stream = 0u << 30, tag_meeting = 1u << 30, tag_resource = 2u << 30,
                                 tag_pair = 3u << 30, tag_bits = 3u << 30;

  /// One call. `code`: an op's number in its program, or one of the marks below.
  struct Entry {
    std::uint32_t stream : 4, code : 28;
    std::uint32_t run;   // op: block run; record, wait: event; memory: how many
    std::int64_t value;  // op, host: duration; record, wait: ticket; memory: index of the first
  };
  static_assert(sizeof(Entry) == 16 && max_streams <= 1 << 4);
  static constexpr std::uint32_t mark_record = (1u << 28) - 1, mark_wait = mark_record - 1, mark_memory = mark_wait - 1,
                                 mark_sync = mark_memory - 1, mark_host = mark_sync - 1, mark_enter = mark_host - 1,
                                 num_codes = mark_enter;

  /// First in, first out; storage is reused.
  struct Fifo {
    std::vector<Entry> items;
    std::size_t head = 0;
    bool empty() const { return head == items.size(); }
    const Entry& front() const { return items[head]; }
    void push(const Entry& e) { items.push_back(e); }
    void pop();
  };
  enum class At : std::uint8_t { idle, running, event, meeting, partner };
  struct Stream {
    Fifo queue;
    At at = At::idle;  // what its head does
    std::int64_t start = 0;
    QueueId partner = 0;                    // of a running send: the receiver
    std::int8_t unmet = 0, unfinished = 0;  // of a transfer: halves that have met nobody yet, that are not over
  };
  struct Host {
    Fifo calls;  // not yet on a stream
    std::int64_t outstanding = 0;
    std::size_t issuing = 0;                 // threaded: calls whose cost it is paying; their effect comes at its end
    bool touched = false;                    // has enqueued since the last advance
    bool dry = false;                        // the engine may not pass, the rank has not said what comes next
    std::int32_t running = 0, awaiting = 0;  // of its streams: how many do something, how many wait for other ranks
    std::int64_t waits_since = -1;           // it has had nothing to do but wait; -1: it has
    std::uint32_t waits_run = 0;             // in this block run
    std::vector<std::uint32_t> last_ticket;  // by event, 0: never recorded
    std::vector<bool> fired;                 // by ticket - first_ticket
    std::uint32_t first_ticket = 1, next_ticket = 1;
  };
  /// Where a group meets, one per stream: members come here in the order of their stream, so one meeting is open at
  /// a time.
  struct Meeting {
    std::int32_t arrived = 0;
    std::int64_t sequence = 1;
    std::int64_t longest = 0;
    std::int64_t bytes = 0;  // of the first; all must agree
    QueueId first = 0;       // who came first
  };
  /// What roles hand over in a group, by stream: how often each has given or taken, and who waits to take.
  struct Handover {
    std::map<Rank, std::int64_t> given, taken;
    std::vector<QueueId> waiting;
  };
  /// Of groups that are alike only one meets: the players of its members, each once.
  struct Group {
    GroupId family = 0;
    std::vector<Rank> players;  // ascending
    bool one_device = false;
  };
  using Pair = std::tuple<GroupId, StreamId, Rank, Rank>;  // family, stream, from, to
  struct Postbox {
    std::deque<QueueId> senders, receivers;
  };
  struct Resource {
    SharedResource sharing;
    std::int64_t due = -1;           // time of the event that is valid
    std::uint32_t due_sequence = 0;  // its number
  };

  /// The cores of one device, where streams are threads. Threads are streams by QueueId, behind them the hosts.
  struct Cores {
    RunQueue queue;
    std::int64_t due = -1;
    std::uint32_t due_sequence = 0;
    bool changed = false;
  };

  Status run(bool final);
  void enqueue(Rank, const Entry&);
  void admit(Rank);
  bool may_admit(const Host&, const Entry&) const;
  void to_stream(Rank, Host&, const Entry&);
  void step(QueueId);
  bool start(QueueId);
  void begin_timed(QueueId, std::int64_t duration, Occupies);
  void arrive(QueueId);
  void hand_over(QueueId, std::uint32_t meeting);
  /// Of its givers one that has not given what it waits for; -1: none.
  Rank lacks(QueueId, std::uint32_t meeting) const;
  void post(QueueId);
  void match(const Pair&);
  void end_half(QueueId);
  void complete(QueueId);
  void retire(Rank);
  void fire(Rank, std::uint32_t ticket);
  bool has_fired(const Host&, std::uint32_t ticket) const;
  void handle(const SimEvent&);
  void reschedule(std::uint32_t resource);
  bool work_left() const;

  // engine_threads.cc: only where streams are threads
  bool threaded() const { return options_.threads.cores > 0; }
  void go_on(std::uint32_t thread, std::int64_t work_ns);
  void dispatch_cores();
  void handle_cores(std::uint32_t device);
  bool is_unmap(Rank, const Entry&) const;
  std::int64_t host_cost(Rank, const Entry&) const;
  void run_host(Rank);
  void host_done(Rank);
  void take_effect(Rank, Host&, const Entry&);

  Rank rank_of(QueueId q) const { return static_cast<Rank>(q / max_streams); }
  const std::string& stream_name(StreamId s) const { return plan_.stream(s).name; }
  StreamId stream_of(QueueId q) const { return static_cast<StreamId>(q % max_streams); }
  const OpInfo& info(QueueId q, const Entry& e) const {
    return (*index_[static_cast<std::size_t>(rank_of(q))])[e.code];
  }
  const Sizes& sizes(QueueId q, const Entry& e) const { return timeline_.run(rank_of(q), e.run).sizes; }
  std::int32_t group_at(GroupId family, Rank r) const {
    return group_of_[static_cast<std::size_t>(family) * hosts_.size() + static_cast<std::size_t>(r)];
  }
  /// Who it sends to and receives from; none: nobody.
  struct Transfer {
    std::optional<Pair> out, in;
  };
  Transfer transfer_of(QueueId, const Op&) const;

  // engine_report.cc: only when something is wrong
  // engine_links.cc: only with use_links()
  /// The cluster's links, and how the ranks and groups that are played lie on them.
  struct Wiring {
    Wiring(const CostModel& model, const ClusterSpec& spec, Rank num_ranks, std::span<const RankFactors> slow)
        : cluster(model, spec, num_ranks, links, slow) {}
    SharedLinks links;
    ClusterLinks cluster;
    std::vector<ClusterLinks::RankLinks> ranks;    // by rank
    std::vector<ClusterLinks::GroupLinks> groups;  // by group
    std::vector<Demand> demands;                   // of the job at hand
    double slowdown = 0.0;                         // of kernels beside communication
    double launch_ns = 0.0;                        // of the host
    std::vector<std::int32_t> communicating;       // by device: what is under way
  };
  /// One more, or one less, of what a rank communicates is under way.
  void communicates(Rank, std::int32_t more);
  void join_links(std::uint32_t job, std::int64_t price_ns);
  void join_copy(QueueId, Occupies direction, std::int64_t price_ns);
  void join_meeting(std::uint32_t id, QueueId any, std::int64_t price_ns);
  void join_pair(QueueId from, QueueId to, std::int64_t price_ns);
  void reschedule_links();
  void handle_links();
  /// What ends with the event of this tag and index: an op, a collective, a transfer.
  void end_timed(std::uint32_t what);

  std::string where(QueueId) const;
  std::string describe(QueueId) const;
  /// The queue that `q` waits for; false when there is none left that could end the wait, with the reason.
  bool waits_for(QueueId q, QueueId& next, std::string& why) const;
  Diagnostic deadlock() const;
  Diagnostic mismatch(const Group&, const Meeting&, QueueId a, QueueId b) const;

  /// A stream begins or ends to do something (running) or to wait for other ranks (awaiting).
  void count_busy(QueueId, std::int32_t running, std::int32_t awaiting);
  void finished(QueueId, const Entry&, std::int64_t start_ns);

  const Plan& plan_;
  const RankClasses& classes_;
  const std::vector<const ProgramIndex*> index_;  // by rank
  Timeline& timeline_;
  EngineOptions options_;
  const std::uint32_t num_streams_;  // of the plan
  std::vector<Stream> streams_;
  std::vector<Host> hosts_;
  std::vector<Group> groups_;                      // all groups of all families
  std::vector<std::int32_t> group_of_;             // [family][rank] -> groups_, -1: none
  std::vector<const std::vector<Rank>*> members_;  // [family][rank] its own group; null: none
  std::vector<Meeting> meetings_;                  // [group][stream]
  std::map<std::uint32_t, Handover> handovers_;    // by the same number
  std::map<Pair, Postbox> postboxes_;
  std::vector<Resource> resources_;  // [device][compute, h2d, d2h]
  std::unique_ptr<Wiring> wiring_;
  bool links_changed_ = false;
  std::int64_t links_due_ = -1;           // time of the event that is valid
  std::uint32_t links_due_sequence_ = 0;  // its number
  std::vector<Cores> cores_;              // by device, threaded only
  std::vector<std::uint32_t> changed_;    // of cores_: to be dispatched
  std::vector<Rank> touched_;
  EventQueue events_;
  std::vector<QueueId> ready_;  // streams whose head may be able to move
  std::int64_t now_ = 0, num_dry_ = 0, num_done_ = 0, num_entries_ = 0, peak_entries_ = 0;
  Diagnostics failure_;
};

}  // namespace hotbunk
