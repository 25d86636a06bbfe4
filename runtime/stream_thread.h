// Streams of a backend on the host: an ordered queue of closures and the thread that runs them, with CUDA's event
// semantics.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace hotbunk {

/// A point in a stream that other streams can wait for. May be recorded again and again; a wait is for the most recent
/// record at the time the wait is *enqueued*. Waiting for an event that was never recorded does nothing (as in CUDA).
/// A handle: copies are the same event.
class StreamEvent {
 public:
  StreamEvent();

 private:
  friend class StreamThread;
  struct State;
  std::shared_ptr<State> state_;
};

class StreamThread {
 public:
  enum class Mode {
    threaded,  // work runs on this stream's own thread
    inlined,   // work runs inside enqueue, for one-rank speed; wait may block the caller
  };

  explicit StreamThread(std::string name, Mode mode = Mode::threaded);
  /// Skips what has not started, waits for what has.
  ~StreamThread();
  StreamThread(const StreamThread&) = delete;
  StreamThread& operator=(const StreamThread&) = delete;

  /// `work`: a callable without arguments; copied where the stream has a thread.
  template <class Work>
  void enqueue(Work&& work) {
    if (mode_ == Mode::threaded) push(std::forward<Work>(work));
    else if (!failed()) run_one(work);
  }
  /// The event fires when all work enqueued here so far is done (or skipped).
  void record(const StreamEvent&);
  /// Work enqueued here later starts after the event's most recent record fired. When the recording stream had failed,
  /// this stream fails with the same exception: its inputs are garbage.
  void wait(const StreamEvent&);
  /// Returns when all work is done. Rethrows the first exception of the stream; work behind it was skipped, and the
  /// stream stays failed.
  void sync();
  /// Has some work thrown? Never blocks for long.
  bool failed() const;

  const std::string& name() const { return name_; }

 private:
  void push(std::function<void()> work);
  void run_loop();
  template <class Work>
  void run_one(Work& work) {
    try {
      work();
    } catch (...) {
      std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
  }
  std::exception_ptr failure() const;

  std::string name_;
  Mode mode_;
  mutable std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false, stop_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace hotbunk
