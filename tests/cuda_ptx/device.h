// A toy device for tests: memory with names, and launches with arguments laid out as a kernel takes them.
#pragma once
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "backends/cuda/ptx/machine.h"

namespace hotbunk::ptx {

/// Arguments of a launch, each at its natural alignment.
class Arguments {
 public:
  template <class... T>
  explicit Arguments(const T&... values) {
    (add(values), ...);
  }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  template <class T>
  void add(const T& value) {
    bytes_.resize((bytes_.size() + alignof(T) - 1) / alignof(T) * alignof(T));
    const auto bytes = std::as_bytes(std::span(&value, 1));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  std::vector<std::byte> bytes_;
};

/// An array in device memory, at an address as round as an allocator gives; gone when it goes. The bytes on both sides
/// belong to no allocation. What is not written is all ones, NaN as a float, so that no test takes it for a result.
template <class T>
class Array {
 public:
  Array(DeviceMemory& memory, std::string name, std::vector<T> values)
      : Array(memory, std::move(name), values.size(), true) {
    std::copy(values.begin(), values.end(), begin());
  }
  Array(DeviceMemory& memory, std::string name, std::size_t n, bool written = false)
      : memory_(memory), n_(n), data_(n * sizeof(T) + 3 * guard, static_cast<std::byte>(written ? 0 : 0xff)) {
    memory_.add(reinterpret_cast<std::uint64_t>(begin()), static_cast<std::int64_t>(n * sizeof(T)), std::move(name),
                written);
  }
  ~Array() { memory_.remove(reinterpret_cast<std::uint64_t>(begin())); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* begin() { return reinterpret_cast<T*>((reinterpret_cast<std::uintptr_t>(data_.data()) / guard + 2) * guard); }
  T& operator[](std::size_t i) { return begin()[i]; }
  std::size_t size() const { return n_; }
  std::vector<T> values() { return {begin(), begin() + n_}; }

 private:
  static constexpr std::size_t guard = 256;
  DeviceMemory& memory_;
  std::size_t n_;
  std::vector<std::byte> data_;
};

}  // namespace hotbunk::ptx
