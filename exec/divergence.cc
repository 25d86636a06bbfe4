#include "exec/divergence.h"

#include <fmt/format.h>

#include <cmath>

#include "exec/backend.h"

namespace hotbunk {
namespace {

/// Blocks of a mini-batch: begin, its micro-batches, step.
constexpr std::int64_t first_micro = 1;

/// "train.layers.3.swiglu" -> " of layer 3"; "" where the op is of no layer.
std::string layer_of(const std::string& label) {
  constexpr std::string_view mark = "layers.";
  const auto at = label.find(mark);
  if (at == std::string::npos) return "";
  const auto begin = at + mark.size();
  return " of layer " + label.substr(begin, label.find('.', begin) - begin);
}

std::string place_of(const BadOutput& bad, std::int64_t num_micros) {
  if (bad.block < first_micro) return "at the mini-batch's begin";
  if (bad.block >= first_micro + num_micros) return "in the step, after all micro-batches";
  return fmt::format("in micro-batch {} of {}", bad.block - first_micro + 1, num_micros);
}

std::string text_of(const BadOutput& bad, std::int64_t num_micros) {
  const std::string op =
      fmt::format("op {} '{}'{} on rank {}", name_of(bad.kind), bad.label, layer_of(bad.label), bad.rank);
  if (bad.block == BadOutput::before_all)
    return fmt::format("no micro-batch made them: {} had left them in the step before: {}", op, bad.what);
  return fmt::format("the first op that made one, on all ranks: {}, {}: {}", op, place_of(bad, num_micros), bad.what);
}

Status play_again(const Plan& plan, Device& device, const std::vector<Args>& blocks, std::int16_t phase) {
  const Program& program = plan.program(device.rank());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    device.watch_numbers(static_cast<std::int64_t>(i));
    const Block& block = program.phases[static_cast<std::size_t>(phase)][static_cast<std::size_t>(blocks[i].block)];
    if (auto s = device.play(program, block, blocks[i]); !s) return s;
    if (auto s = device.sync(); !s) return s;
  }
  return {};
}

/// "nan" whatever its sign bit, which says nothing.
std::string number(double x) { return std::isnan(x) ? "nan" : fmt::format("{:.6g}", x); }

}  // namespace

Diverged::Diverged(std::int32_t step, std::int64_t mini, double loss, double grad_norm)
    : RuntimeFailure(fmt::format("step {}, mini-batch {}: the loss is {}, the gradient norm is {}", step, mini + 1,
                                 number(loss), number(grad_norm))),
      step_(step),
      mini_(mini) {}

Status explain_divergence(const Plan& plan, Device& device, Driver& driver, std::int16_t phase, const Diverged& d) {
  const std::vector<Args> blocks = driver.mini_batch(device.rank(), d.step(), d.mini());
  if (auto s = play_again(plan, device, blocks, phase); !s) return s;
  const auto num_micros = static_cast<std::int64_t>(blocks.size()) - 2;
  const auto bad = device.first_bad_output();
  return fail(Diagnostic{
      .code = "E630",
      .message = fmt::format("{}: the run ends before the optimizer changes a weight", d.what()),
      .where = {},
      .notes = {fmt::format("phase {}, block step; every rank has the same sums",
                            plan.phases[static_cast<std::size_t>(phase)].name),
                bad ? text_of(*bad, num_micros) : "played again, no op made a number that is not finite"},
      .help = "checkpoints are those of the steps before; lower optimizer.lr or optimizer.max_grad_norm, or warm up "
              "(optimizer.warmup_steps)"});
}

}  // namespace hotbunk
