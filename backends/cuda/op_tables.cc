#include "backends/cuda/op_tables.h"

#include <algorithm>
#include <cstring>

#include "backends/cuda/staging.h"
#include "runtime/rope_frequencies.h"

namespace hotbunk::cuda {
namespace {

bool has_boxes(OpKind kind) {
  return kind == OpKind::copy_boxes || kind == OpKind::hash_boxes || kind == OpKind::peer_copy;
}

bool has_frequencies(OpKind kind) {
  return kind == OpKind::rope || kind == OpKind::rope_backward || kind == OpKind::latent_norm ||
         kind == OpKind::latent_norm_backward;
}

/// Bytes in order, each thing once.
class Image {
 public:
  /// Where it lies, in bytes from the beginning; 16-byte aligned.
  std::int64_t add(const void* data, std::size_t bytes) {
    const std::string key(static_cast<const char*>(data), bytes);
    const auto [it, added] = known_.try_emplace(key, static_cast<std::int64_t>(bytes_.size()));
    if (!added) return it->second;
    bytes_.resize((bytes_.size() + bytes + 15) / 16 * 16);
    std::memcpy(bytes_.data() + it->second, data, bytes);
    return it->second;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
  std::map<std::string, std::int64_t> known_;
};

struct DeviceBox {
  std::int64_t src_offset, src_pitch, dst_offset, dst_pitch, rows, cols;
};
static_assert(sizeof(DeviceBox) == OpTables::box_bytes);

/// Runs of boxes with the same input and output; the table is an offset into the image so far.
std::vector<BoxRun> runs_of(const std::vector<Box>& all, Image& image) {
  std::vector<BoxRun> out;
  for (std::size_t i = 0; i < all.size();) {
    const Box& first = all[i];
    BoxRun run{first.input, first.output};
    std::vector<DeviceBox> boxes;
    for (; i < all.size() && all[i].input == first.input && all[i].output == first.output &&
           std::ssize(boxes) < OpTables::most_boxes;
         ++i) {
      const Box& b = all[i];
      boxes.push_back({b.src_offset, b.src_pitch, b.dst_offset, b.dst_pitch, b.rows, b.cols});
      run.most_elements = std::max(run.most_elements, b.elements());
    }
    run.boxes = std::ssize(boxes);
    run.table = static_cast<CUdeviceptr>(image.add(boxes.data(), boxes.size() * sizeof(DeviceBox)));
    out.push_back(run);
  }
  return out;
}

/// Copies to the device and waits.
void upload(const Context& context, CUdeviceptr to, const std::vector<std::byte>& bytes) {
  const OwnedStream stream(context);
  Staging staging(context, stream.handle());
  std::byte* from = staging.take(std::ssize(bytes));
  std::ranges::copy(bytes, from);
  HB_CUDA(context.driver(), cuMemcpyHtoDAsync(to, from, bytes.size(), stream.handle()));
  HB_CUDA(context.driver(), cuStreamSynchronize(stream.handle()));
}

}  // namespace

OpTables::OpTables(const Context& context, const Program& program, const Places& places) {
  Image image;
  for (const Body& body : program.bodies)
    for (const Op& op : body.ops) {
      if (has_boxes(op.kind)) boxes_[&op] = runs_of(boxes_of(op, places), image);
      if (!has_frequencies(op.kind)) continue;
      const std::vector<float> f = rope_frequencies(op);
      frequencies_[&op] = static_cast<CUdeviceptr>(image.add(f.data(), f.size() * sizeof(float)));
    }
  if (image.bytes().empty()) return;
  memory_ = std::make_unique<DeviceBlock>(context, std::ssize(image.bytes()));
  upload(context, memory_->address(), image.bytes());
  for (auto& [op, runs] : boxes_)
    for (BoxRun& run : runs) run.table += memory_->address();
  for (auto& [op, table] : frequencies_) table += memory_->address();
}

std::span<const BoxRun> OpTables::boxes(const Op& op) const { return boxes_.at(&op); }
CUdeviceptr OpTables::frequencies(const Op& op) const { return frequencies_.at(&op); }

}  // namespace hotbunk::cuda
