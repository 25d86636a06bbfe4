#include "tests/paths.h"

namespace hotbunk {

const char* const source_folder = HOTBUNK_SOURCE_DIR;
const char* const build_folder = HOTBUNK_BINARY_DIR;
const char* const program_file = HOTBUNK_BINARY_DIR "/hotbunk";

}  // namespace hotbunk
