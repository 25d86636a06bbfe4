// What is so of every parameter of a role, whatever the family: how it begins, how tensor parallelism cuts it, who
// finds its gradients, where it lies among others and what an engine calls it. One line for each role, in
// parameter_roles.cc; a role is its line there, and nothing follows from the order of the enumeration.
#pragma once
#include <cstdint>
#include <string_view>

#include "spec/model.h"

namespace hotbunk {

/// What each rank of a tensor-parallel group has.
enum class RoleCut : std::uint8_t {
  whole,          // all of it
  rows,           // a part of its rows
  columns,        // of its columns
  vocabulary,     // of its rows, rounded up
  query_rows,     // the rows of its query heads
  query_columns,  // the columns of its query heads
  key_rows,       // the rows of its key/value heads, of which several ranks have the same where there are too few
};

/// How a parameter begins that no file has.
enum class RoleStart : std::uint8_t {
  normal,  // with the model's deviation
  one,     // so that a norm multiplies by one (ModelSpec::norm_offset)
  zero,
  uniform,  // within 1/sqrt(columns)
};

/// What a rank of a tensor-parallel group that has all of a parameter finds of its gradients.
enum class RoleGradient : std::uint8_t {
  by_tokens,  // what its tokens add: all of it where every rank has all tokens
  whole,      // all of it, also where tokens are cut: a bias behind a sum over the ranks
  parts,      // what its heads, or its columns of something, add
};

struct RoleRule {
  ParamRole role;
  bool vector;  // of one dimension
  RoleCut cut;
  RoleStart start;
  RoleGradient gradient;
  /// The buffer of an engine that begins with it; empty: it is behind another one in its buffer, or no engine has it.
  std::string_view engine = {};
  /// Of a routed expert: what of all experts lies together, in this order, expert by expert; 0: of none.
  int stack = 0;
  bool adapter = false;
  bool fixed = false;  // no gradient reaches it, and no optimizer steps it
};
const RoleRule& rule_of(ParamRole);

/// Where a role stands among the others of its unit: in the order of use, with what is multiplied as one packed matrix
/// adjacent. What no optimizer steps stands behind all else that no expert has.
int place_in_unit(ParamRole);

}  // namespace hotbunk
