// Stands in for libFuzzer where the compiler has none: runs the target on every file of the folders given, so that CI
// replays the corpus with any compiler.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  int num_inputs = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(argv[i])) {
      if (!entry.is_regular_file()) continue;
      std::ifstream in(entry.path(), std::ios::binary);
      const std::vector<char> bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
      try {
        LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
      } catch (const std::exception& e) {
        std::cerr << entry.path().string() << ": " << e.what() << "\n";
        return 1;
      }
      ++num_inputs;
    }
  }
  std::cout << num_inputs << " inputs replayed\n";
  return num_inputs > 0 ? 0 : 1;  // an empty corpus proves nothing
}
