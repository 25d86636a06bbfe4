// safetensors: what is written comes back bit for bit, alone and sharded; conversions; atomic replacement; and a
// property that no damaged header is ever believed.
#include "spec/safetensors.h"

#include <fcntl.h>
#include <rapidcheck.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "base/check.h"
#include "base/file.h"
#include "base/rng.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

struct Folder {
  fs::path path = fs::temp_directory_path() / ("hotbunk-safetensors-" + std::to_string(::getpid()));
  Folder() { fs::remove_all(path); }
  ~Folder() { fs::remove_all(path); }
};

std::vector<std::byte> random_bytes(std::size_t n, std::uint64_t key) {
  std::vector<std::byte> bytes(n);
  for (std::size_t i = 0; i < n; ++i) bytes[i] = std::byte(random_words(1, RngPurpose::test, key, i)[0] & 0xff);
  return bytes;
}

std::size_t bytes_of(const TensorEntry& e) {
  std::size_t n = static_cast<std::size_t>(size_of(e.dtype));
  for (auto extent : e.shape) n *= static_cast<std::size_t>(extent);
  return n;
}

const std::vector<TensorEntry> entries = {
    {"w", DType::bf16, {7, 5}}, {"empty", DType::f32, {0, 3}}, {"scalar", DType::f64, {}},  {"ids", DType::i64, {4}},
    {"mask", DType::u8, {3}},   {"b", DType::f32, {11}},       {"half", DType::f16, {2, 3}}};

void write_all(const fs::path& target, std::int64_t max_shard_bytes) {
  auto writer = SafetensorsWriter::create(target, entries, max_shard_bytes);
  REQUIRE(writer);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto data = random_bytes(bytes_of(entries[i]), i);
    const auto width = static_cast<std::size_t>(size_of(entries[i].dtype));
    const std::size_t half = data.size() / width / 2;  // the last elements first
    REQUIRE(writer->write(i, static_cast<std::int64_t>(half), std::span(data).subspan(half * width)));
    REQUIRE(writer->write(i, 0, std::span(data).first(half * width)));
  }
  REQUIRE(writer->finish());
}

void check_all(const Checkpoint& checkpoint) {
  REQUIRE(checkpoint.tensors().size() == entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    INFO(entries[i].name);
    const TensorView* view = checkpoint.find(entries[i].name);
    REQUIRE(view != nullptr);
    CHECK(view->dtype == entries[i].dtype);
    CHECK(view->shape == entries[i].shape);
    const auto data = random_bytes(bytes_of(entries[i]), i);
    CHECK(std::equal(data.begin(), data.end(), view->data.begin(), view->data.end()));
  }
}

/// One file in memory with one tensor `name` of `dtype` and the bytes.
template <class T>
std::vector<float> converted(DType dtype, const std::vector<T>& values) {
  const TensorView view{"t", dtype, {static_cast<std::int64_t>(values.size())}, std::as_bytes(std::span(values)), {}};
  std::vector<float> out(values.size());
  copy_as_f32(view, 0, out);
  return out;
}

}  // namespace

TEST_CASE("what is written comes back bit for bit: one file, a folder, shards") {
  const Folder folder;
  SECTION("one file") {
    write_all(folder.path / "state.safetensors", 1 << 30);
    const auto c = Checkpoint::open(folder.path / "state.safetensors");
    REQUIRE(c);
    check_all(*c);
  }
  SECTION("a folder that fits one shard") {
    write_all(folder.path, 1 << 30);
    CHECK(fs::exists(folder.path / "model.safetensors"));
    const auto c = Checkpoint::open(folder.path);
    REQUIRE(c);
    check_all(*c);
  }
  SECTION("shards, then one file again: the old index must not win") {
    write_all(folder.path, 40);
    CHECK(fs::exists(folder.path / "model.safetensors.index.json"));
    // 70 | 0 + 8 + 32 | 3 | 44 > 40 alone | 12: entries are never split, never reordered.
    CHECK(fs::exists(folder.path / "model-00001-of-00005.safetensors"));
    const auto c = Checkpoint::open(folder.path);
    INFO((c ? "" : render(c.error())));
    REQUIRE(c);
    check_all(*c);
    write_all(folder.path, 1 << 30);
    CHECK_FALSE(fs::exists(folder.path / "model.safetensors.index.json"));
  }
}

TEST_CASE("several writers fill the same files, each with its own elements, also those that take turns") {
  const Folder folder;
  const std::vector<TensorEntry> shared = {{"a", DType::f32, {40}}, {"b", DType::bf16, {4000, 50}}};
  const auto a = random_bytes(160, 0), b = random_bytes(400000, 1);
  auto first = SafetensorsWriter::create(folder.path, shared, 200);
  REQUIRE(first);
  std::vector<pid_t> writers;
  for (int w = 0; w < 3; ++w) {
    writers.push_back(::fork());
    if (writers.back() != 0) continue;
    auto writer = SafetensorsWriter::join(folder.path, shared, 200);
    bool good = writer.has_value();
    for (std::int64_t i = w; good && i < 40; i += 3)
      good = writer->write(0, i, std::span(a).subspan(i * 4, 4)).has_value();
    // Of each row every third element, from w on: the others between them are written meanwhile.
    for (std::int64_t row = 0; good && row < 4000; ++row) {
      std::vector<std::byte> own;
      for (std::int64_t i = w; i < 50; i += 3)
        own.insert(own.end(), b.begin() + (row * 50 + i) * 2, b.begin() + (row * 50 + i) * 2 + 2);
      good = writer->write(1, row * 50 + w, 3, own).has_value();
    }
    ::_exit(good && writer->finish() ? 0 : 1);
  }
  for (const pid_t writer : writers) {
    int status = 1;
    ::waitpid(writer, &status, 0);
    CHECK(status == 0);
  }
  REQUIRE(first->finish());
  const auto read = Checkpoint::open(folder.path);
  REQUIRE(read);
  const auto same = [&](const char* name, const std::vector<std::byte>& bytes) {
    const TensorView* view = read->find(name);
    return view != nullptr && std::ranges::equal(view->data, bytes);
  };
  CHECK(same("a", a));
  CHECK(same("b", b));
  fs::remove(folder.path / "model-00001-of-00002.safetensors");
  auto late = SafetensorsWriter::join(folder.path, shared, 200);
  REQUIRE(late);
  const Status gone = late->write(0, 0, std::span(a).first(4));
  REQUIRE_FALSE(gone);
  CHECK(gone.error().front().code == "E103");
}

TEST_CASE("a file is open for reading only where elements take turns, and of many files some are open at a time") {
  const Folder folder;
  const std::vector<TensorEntry> pair = {{"a", DType::f32, {4}}};
  const auto values = random_bytes(16, 0);
  auto writer = SafetensorsWriter::create(folder.path, pair);
  REQUIRE(writer);
  // What /proc says of the descriptors of files below the folder.
  const auto open_files = [&](bool readable) {
    int n = 0;
    for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
      std::error_code ec;
      if (!fs::read_symlink(entry.path(), ec).string().starts_with(folder.path.string())) continue;
      const int flags = ::fcntl(std::stoi(entry.path().filename().string()), F_GETFL);
      n += !readable || (flags & O_ACCMODE) == O_RDWR;
    }
    return n;
  };
  REQUIRE(writer->write(0, 0, std::span(values).first(8)));
  CHECK(open_files(true) == 0);
  CHECK(open_files(false) == 1);
  REQUIRE(writer->write(0, 1, 2, std::span(values).first(8)));
  CHECK(open_files(true) == 1);
  REQUIRE(writer->write(0, 0, values));
  REQUIRE(writer->finish());
  CHECK(open_files(false) == 0);
  CHECK(std::ranges::equal(Checkpoint::open(folder.path)->find("a")->data, values));

  std::vector<TensorEntry> many;
  for (int i = 0; i < 70; ++i) many.push_back({"t" + std::to_string(i), DType::f32, {2}});
  auto shards = SafetensorsWriter::create(folder.path / "many", many, 8);
  REQUIRE(shards);
  for (std::size_t half = 0; half < 2; ++half)
    for (std::size_t i = 0; i < many.size(); ++i)
      REQUIRE(shards->write(i, static_cast<std::int64_t>(half), std::span(values).subspan(4 * ((i + half) % 4), 4)));
  CHECK(open_files(false) == 64);
  REQUIRE(shards->finish());
  CHECK(open_files(false) == 0);
  const auto read = Checkpoint::open(folder.path / "many");
  REQUIRE(read);
  for (std::size_t i = 0; i < many.size(); ++i) {
    const auto data = read->find(many[i].name)->data;
    CHECK(std::ranges::equal(data.first(4), std::span(values).subspan(4 * (i % 4), 4)));
    CHECK(std::ranges::equal(data.last(4), std::span(values).subspan(4 * ((i + 1) % 4), 4)));
  }
}

TEST_CASE("a writer refuses repeated names, too many bytes, and folders it cannot make") {
  const Folder folder;
  auto twice = SafetensorsWriter::create(folder.path, {{"a", DType::f32, {1}}, {"a", DType::f32, {1}}});
  REQUIRE_FALSE(twice);
  CHECK(twice.error()[0].code == "E409");
  auto writer = SafetensorsWriter::create(folder.path / "x.safetensors", {{"a", DType::f32, {1}}});
  REQUIRE(writer);
  CHECK_THROWS_AS(writer->write(0, 0, random_bytes(5, 0)), InternalError);
  CHECK_THROWS_AS(writer->write(0, 1, random_bytes(4, 0)), InternalError);
  auto nowhere = SafetensorsWriter::create("/dev/null/x.safetensors", {{"a", DType::f32, {1}}});
  REQUIRE_FALSE(nowhere);
  CHECK(nowhere.error()[0].code == "E103");
}

TEST_CASE("conversions to fp32 are exact") {
  using U = std::vector<std::uint16_t>;
  // fp16: 1, -2, the largest (65504), the smallest normal 2^-14, the smallest subnormal 2^-24, -0.
  CHECK(converted(DType::f16, U{0x3c00, 0xc000, 0x7bff, 0x0400, 0x0001}) ==
        std::vector<float>{1, -2, 65504, 0x1.0p-14f, 0x1.0p-24f});
  CHECK(std::signbit(converted(DType::f16, U{0x8000})[0]));
  CHECK(std::isinf(converted(DType::f16, U{0x7c00})[0]));
  CHECK(std::isnan(converted(DType::f16, U{0x7e00})[0]));
  // bf16 is the upper half of an fp32: 1.0 = 0x3f80, -3.5 = 0xc060.
  CHECK(converted(DType::bf16, U{0x3f80, 0xc060}) == std::vector<float>{1.0f, -3.5f});
  CHECK(converted(DType::f64, std::vector<double>{0.1}) == std::vector<float>{0.1f});
}

TEST_CASE("a range of a tensor is converted without the rest") {
  const std::vector<float> values = {0, 1, 2, 3, 4, 5};
  const TensorView view{"t", DType::f32, {3, 2}, std::as_bytes(std::span(values)), {}};
  std::vector<float> rows(2);
  copy_as_f32(view, 2, rows);
  CHECK(rows == std::vector<float>{2, 3});
  CHECK_THROWS_AS(copy_as_f32(view, 5, rows), InternalError);
}

TEST_CASE("NaN is found wherever it stands") {
  std::vector<float> values(200000, 1.0f);
  values[70001] = std::numeric_limits<float>::quiet_NaN();  // beyond the first block that the check looks at
  const TensorView view{
      "t", DType::f32, {2000, 100}, std::as_bytes(std::span(values)), std::make_shared<const std::string>("f")};
  const auto status = check_finite(view);
  REQUIRE_FALSE(status);
  CHECK(status.error()[0].message == "tensor \"t\" holds NaN at element (700, 1)");
}

TEST_CASE("property: a damaged file is refused or read inside its bounds, never believed") {
  const Folder folder;
  write_all(folder.path / "state.safetensors", 1 << 30);
  const std::string good = *read_file(folder.path / "state.safetensors");
  std::uint64_t header = 0;
  std::memcpy(&header, good.data(), 8);
  CHECK(rc::check([&] {
    std::string bad = good;
    const auto at = *rc::gen::inRange<std::size_t>(0, 8 + header);
    bad[at] = static_cast<char>(*rc::gen::inRange(0, 256));
    if (*rc::gen::inRange(0, 4) == 0) bad.resize(*rc::gen::inRange<std::size_t>(0, bad.size()));
    const auto bytes = std::as_bytes(std::span(bad));
    const auto tensors = parse_safetensors(bytes, "bad");
    if (!tensors) return;
    for (const auto& t : *tensors) {
      RC_ASSERT(t.data.data() >= bytes.data());
      RC_ASSERT(t.data.data() + t.data.size() <= bytes.data() + bytes.size());
      std::int64_t n = 1;
      for (auto extent : t.shape) n *= extent;
      RC_ASSERT(n == t.numel());
    }
  }));
}

}  // namespace hotbunk
