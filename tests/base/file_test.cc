// Files of users: what is no regular file is refused at once, and a write leaves the whole file or nothing.
#include "base/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>

#include "base/diagnostic.h"
#include "base/lines.h"
#include "base/partial_file.h"
#include "base/printable.h"

using namespace hotbunk;
namespace fs = std::filesystem;

namespace {

struct Folder {
  fs::path path = fs::temp_directory_path() / ("hotbunk_files_" + std::to_string(::getpid()));
  Folder() { fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& entry : fs::directory_iterator(path)) out.push_back(entry.path().filename().string());
    std::sort(out.begin(), out.end());
    return out;
  }
};
using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("a pipe, a device or a folder is no file, and nobody waits for one") {
  const Folder folder;
  const fs::path pipe = folder.path / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  for (const auto& [path, what] :
       {std::pair<fs::path, const char*>{pipe, "a pipe"}, {"/dev/zero", "a device"}, {folder.path, "directory"}}) {
    const auto text = read_file(path, 1000);
    REQUIRE_FALSE(text);
    CHECK(text.error()[0].code == "E101");
    CHECK_THAT(text.error()[0].message, Catch::Contains(what));
    CHECK(text.error()[0].where.file == path.string());
    CHECK_FALSE(open_regular_file(path));
  }
}

TEST_CASE("a file's size is asked before it is read") {
  const Folder folder;
  const fs::path sparse = folder.path / "sparse";
  std::ofstream(sparse).close();
  fs::resize_file(sparse, std::uintmax_t{1} << 40);  // 1 TiB of nothing
  const auto text = read_file(sparse);
  REQUIRE_FALSE(text);
  CHECK(text.error()[0].code == "E102");
  CHECK(read_file("/proc/self/cmdline").value().size() > 4);  // says that it is empty, and is not
}

TEST_CASE("a write through a link replaces what it points at, and the link stays") {
  const Folder folder;
  const fs::path link = folder.path / "link", target = folder.path / "target";
  fs::create_symlink("target", link);
  REQUIRE(write_file_atomic(link, "one"));  // the target does not exist yet
  CHECK(fs::is_symlink(link));
  CHECK(read_file(target).value() == "one");
  REQUIRE(write_file_atomic(link, "two"));
  CHECK(read_file(target).value() == "two");
  CHECK(folder.names() == Names{"link", "target"});
  fs::create_symlink("round", folder.path / "round");
  CHECK(write_file_atomic(folder.path / "round", "").error()[0].code == "E103");
}

TEST_CASE("what waits under a foreseeable name is not followed") {
  const Folder folder;
  const fs::path target = folder.path / "plan.json", victim = folder.path / "victim";
  REQUIRE(write_file_atomic(victim, "precious"));
  // The name that partial files once had.
  fs::create_symlink(victim, target.string() + "." + std::to_string(::getpid()) + ".tmp");
  REQUIRE(write_file_atomic(target, "plan"));
  CHECK(read_file(victim).value() == "precious");
  CHECK(read_file(target).value() == "plan");
}

TEST_CASE("a partial file shows nothing until it is whole, and leaves nothing when it is not") {
  const Folder folder;
  const fs::path target = folder.path / "a";
  REQUIRE(write_file_atomic(target, "old"));
  const std::string text = "new";
  {
    auto partial = PartialFile::create(target);
    REQUIRE(partial);
    REQUIRE(partial->write(std::as_bytes(std::span(text))));
    CHECK(read_file(target).value() == "old");
  }
  CHECK(folder.names() == Names{"a"});
  auto partial = PartialFile::create(target);
  REQUIRE(partial->write(std::as_bytes(std::span(text))));
  REQUIRE(partial->sync());
  REQUIRE(partial->commit());
  CHECK(read_file(target).value() == "new");
  CHECK(folder.names() == Names{"a"});
  // A rename that cannot be: the folder became one with the target's name.
  {
    auto late = PartialFile::create(folder.path / "b");
    REQUIRE(late->write(std::as_bytes(std::span(text))));
    REQUIRE(late->sync());
    fs::create_directories(folder.path / "b" / "full");
    CHECK(late->commit().error()[0].code == "E103");
  }
  CHECK(folder.names() == Names{"a", "b"});
}

TEST_CASE("a device is written into, not replaced") {
  REQUIRE(check_writable("/dev/null"));
  REQUIRE(write_file_atomic("/dev/null", "gone"));
  CHECK(fs::is_character_file("/dev/null"));
  const Folder folder;
  const fs::path pipe = folder.path / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(write_file_atomic(pipe, "nobody reads").error()[0].code == "E103");  // at once
}

TEST_CASE("asking whether a file could be written leaves nothing") {
  const Folder folder;
  REQUIRE(check_writable(folder.path / "deep" / "a"));
  CHECK(folder.names() == Names{"deep"});
  CHECK(fs::is_empty(folder.path / "deep"));
  CHECK(check_writable(folder.path / std::string(300, 'n')).error()[0].code == "E103");
}

TEST_CASE("what a terminal would obey is printed escaped") {
  CHECK(printable("a\x1b[31mb\x07") == "a\\x1b[31mb\\x07");
  CHECK(printable("two\n\tlines") == "two\n\tlines");
  CHECK(printable_line("two\n\tlines") == "two\\n\\tlines");
  CHECK(printable("\xc2\x9b"
                  "31m") == "\\u009b31m");  // C1: CSI in one character
  CHECK(printable("\xe2\x80\xae"
                  "exe") == "\\u202eexe");       // right-to-left override
  CHECK(printable("\xff\xc3") == "\\xff\\xc3");  // no UTF-8
  CHECK(printable("Grüße … 模型") == "Grüße … 模型");
  const Diagnostic d{.code = "E202",
                     .message = "unknown key \x1b]0;title\x07",
                     .where = {"a\x1b.yaml", 1, 2},
                     .notes = {"\x1bnote"},
                     .help = "\x1bhelp"};
  CHECK(render(d).find('\x1b') == std::string::npos);
  CHECK(render(d).find("--> a\\x1b.yaml:1:2") != std::string::npos);
}

TEST_CASE("lines end, are cut short or have a most") {
  std::istringstream file("one\n\nthree, which is longer\nlast");
  std::string line;
  CHECK(next_line(file, line) == LineRead::whole);
  CHECK(line == "one");
  CHECK(next_line(file, line) == LineRead::whole);
  CHECK(line.empty());
  CHECK(next_line(file, line, 5) == LineRead::too_long);
  CHECK(line == "three");
  CHECK(next_line(file, line) == LineRead::whole);  // behind the byte that was too many
  CHECK(line == " which is longer");
  CHECK(next_line(file, line, 4) == LineRead::cut);
  CHECK(line == "last");
  CHECK(next_line(file, line) == LineRead::none);
  std::ifstream folder("/");  // opens, and gives no bytes (EISDIR)
  CHECK(next_line(folder, line) == LineRead::failed);
}
