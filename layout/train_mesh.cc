#include "layout/train_mesh.h"

#include "base/check.h"

namespace hotbunk {

Mesh train_mesh(const TrainLayout& l) {
  auto mesh = mesh_from_order(l.order, {{"tp", l.tp}, {"cp", l.cp * l.ulysses}, {"dp", l.dp}, {"pp", l.pp}});
  HB_CHECK(mesh.has_value(), "an order that the loader let pass: {}", l.order);
  return std::move(*mesh);
}

}  // namespace hotbunk
