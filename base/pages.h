// Pages of a range of addresses, had and given back by several threads: the kernel zeroes and frees them in whichever
// thread asks, some GB/s each.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hotbunk {

inline constexpr std::int64_t huge_page_bytes = 2 << 20;  // x86-64 and arm64 with 4 KiB base pages

/// Touches every page of a writable private range, or of a shared one, and changes none, so that each is ours. With
/// MADV_POPULATE_WRITE (Linux 5.14) an exhausted machine is an errno. False with errno, and then some pages may be
/// there. `begin`: of a page; `threads`: at most, the caller's among them.
bool populate_pages(std::byte* begin, std::int64_t bytes, int threads);

/// The same of a range whose pages its file has already, in less time: the kernel maps many at once.
bool map_present_pages(std::byte* begin, std::int64_t bytes, int threads);

/// Gives the pages of a private range back to the machine; what is read there next is zeros. False with errno.
bool discard_pages(std::byte* begin, std::int64_t bytes, int threads);

}  // namespace hotbunk
