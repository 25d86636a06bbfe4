// What calibrate gathers on any backend: seconds of ops by size, on all ranks, and the tables that it prints.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "planner/cost/hardware.h"

namespace hotbunk {

struct CalibrateArguments {
  ScenarioOptions scenario;
  std::string out = "calibration.yaml";
  std::string backend = "cpu";
  std::optional<std::int32_t> steps;
};

/// Seconds of all runs of one op at one size.
struct Sample {
  Measurement at;
  std::vector<double> seconds;
  std::vector<double> first;  // of products: a rank's first of its size, for which a kernel is made
};
using Samples = std::map<std::string, Sample>;

std::string key_of(const Measurement&);
/// [op, dtype, a, b, c, [seconds…], [first…]] rows, for another rank's merge().
std::string text_of(const Samples&);
Samples merge(const std::vector<std::string>& ranks);

/// Begins the source of a profile whose times are no hardware's.
constexpr const char* double_profile = "the driver's double, no hardware";

constexpr std::int32_t cold_step = 1;  // the first iteration touches memory and builds primitives

double quantile(std::vector<double> values, double q);
double mean(const std::vector<double>& values);
bool is_collective(const std::string& op);

/// nccl-tests' columns: algbw = size / time; busbw = algbw * 2(W-1)/W for all-reduce, (W-1)/W for gather and scatter.
void print_collectives(const std::vector<Measurement>&);
void print_gemms(const std::vector<Measurement>&);

/// calibrate --backend cuda or cuda-fake.
int calibrate_on_cuda(CalibrateArguments);

}  // namespace hotbunk
