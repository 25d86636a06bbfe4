// A user's mistake, as data: what, where, the arithmetic and the remedy (STYLE: errors). All of them are collected
// before a command gives up; an internal fault is a check (check.h) instead.
#pragma once
#include <string>
#include <tl/expected.hpp>
#include <vector>

namespace hotbunk {

/// Where in an input; line and column count from 1, 0 = unknown.
struct SourceLocation {
  std::string file;
  int line = 0;
  int column = 0;
};

enum class Severity { error, warning };

struct Diagnostic {
  std::string code;  // "E203"; docs/errors.md lists them all
  std::string message;
  SourceLocation where;
  std::vector<std::string> notes;  // the arithmetic
  std::string help;                // the remedy
  Severity severity = Severity::error;
};

using Diagnostics = std::vector<Diagnostic>;

/// A value, or why there is none.
template <class T>
using Result = tl::expected<T, Diagnostics>;
using Status = Result<void>;

inline auto fail(Diagnostic d) { return tl::unexpected<Diagnostics>(Diagnostics{std::move(d)}); }
inline auto fail(Diagnostics d) { return tl::unexpected<Diagnostics>(std::move(d)); }

/// The text of STYLE.md, one trailing newline per line, what a terminal would obey escaped (base/printable.h):
///   error[E203]: mesh does not cover the cluster
///     --> scenarios/qwen.yaml:23:3
///      = note: …
///      = help: …
std::string render(const Diagnostic&);
std::string render(const Diagnostics&);

/// The candidate nearest to `found` by edit distance, or "" when none is near (distance > max(2, |found| / 3)).
std::string nearest_name(const std::string& found, const std::vector<std::string>& candidates);

}  // namespace hotbunk
