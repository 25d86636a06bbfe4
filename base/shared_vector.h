// A vector whose copies share one array until one of them is changed: the programs of many ranks are mostly the same
// ops and buffers.
#pragma once
#include <atomic>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

namespace hotbunk {

/// Used as a std::vector is. What may change elements (every function that is not const) first takes an array of its
/// own where others share it, so that a const reference is what to read through. Threads may read and copy one vector
/// at a time, and change those that are their own.
template <class T>
class SharedVector {
  using Vector = std::vector<T>;

 public:
  using value_type = T;
  using iterator = typename Vector::iterator;
  using const_iterator = typename Vector::const_iterator;

  SharedVector() = default;
  SharedVector(Vector elements) : elements_(std::make_shared<Vector>(std::move(elements))) {}
  SharedVector(std::initializer_list<T> elements) : SharedVector(Vector(elements)) {}

  const Vector& get() const {
    static const Vector none;
    return elements_ ? *elements_ : none;
  }
  operator const Vector&() const { return get(); }
  std::size_t size() const { return get().size(); }
  bool empty() const { return get().empty(); }
  const_iterator begin() const { return get().begin(); }
  const_iterator end() const { return get().end(); }
  const T* data() const { return get().data(); }
  const T& operator[](std::size_t i) const { return get()[i]; }
  const T& front() const { return get().front(); }
  const T& back() const { return get().back(); }

  /// For what a vector can do beside this.
  Vector& edit() {
    if (!elements_) elements_ = std::make_shared<Vector>();
    else if (!alone()) elements_ = std::make_shared<Vector>(*elements_);
    return *elements_;
  }
  operator Vector&() { return edit(); }
  iterator begin() { return edit().begin(); }
  iterator end() { return edit().end(); }
  T* data() { return edit().data(); }
  T& operator[](std::size_t i) { return edit()[i]; }
  T& front() { return edit().front(); }
  T& back() { return edit().back(); }
  void push_back(T value) { edit().push_back(std::move(value)); }

  /// Whether both are one array: then they are equal, and what is proven of one is proven of the other.
  bool shares(const SharedVector& o) const { return elements_ == o.elements_; }
  friend bool operator==(const SharedVector& a, const SharedVector& b) { return a.shares(b) || a.get() == b.get(); }

 private:
  /// use_count is a relaxed read; the fence lets what another thread read before it let go happen before what is
  /// changed from now on.
  bool alone() const {
    if (elements_.use_count() > 1) return false;
#ifndef __SANITIZE_THREAD__  // which knows no fences
    std::atomic_thread_fence(std::memory_order_acquire);
#endif
    return true;
  }

  std::shared_ptr<Vector> elements_;
};

}  // namespace hotbunk
