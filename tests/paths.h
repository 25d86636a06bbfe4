// Where this checkout and its build are, for tests that read files or start the program. Compiled in one place
// (paths.cc), so that what the compiler sees of every test is the same in any folder.
#pragma once

namespace hotbunk {

extern const char* const source_folder;  // absolute
extern const char* const build_folder;
extern const char* const program_file;  // build_folder/hotbunk

}  // namespace hotbunk
