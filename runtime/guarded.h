// What a device call throws, as what the user reads: which op, and what happened.
#pragma once
#include <fmt/format.h>

#include <concepts>
#include <exception>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/diagnostic.h"
#include "graph/bound.h"
#include "graph/print.h"

namespace hotbunk {

/// E699 for an InternalError, E602 for any other exception; `what` stands in the note.
template <class What, class F>
Status guarded(What&& what, F&& call) {
  try {
    call();
    return {};
  } catch (const InternalError& e) {
    return fail(Diagnostic{.code = "E699",
                           .message = e.what(),
                           .where = {},
                           .notes = {what()},
                           .help = "this is a fault of hotbunk; please report it with the scenario"});
  } catch (const std::exception& e) {
    return fail(Diagnostic{.code = "E602",
                           .message = e.what(),
                           .where = {},
                           .notes = {what()},
                           .help = "`hotbunk doctor` tries memory, sockets and threads of this machine; what another "
                                   "rank said first may be the cause"});
  }
}

template <class F>
Status guarded(const BoundOp& op, F&& call) {
  return guarded([&] { return fmt::format("op {} '{}'", name_of(op->kind), label_of(op)); }, std::forward<F>(call));
}

/// What `work` throws, with `what` it was for.
template <std::invocable What, class F>
void naming(What&& what, F&& work) {
  try {
    work();
  } catch (const InternalError& e) {
    throw InternalError(fmt::format("{} ({})", e.what(), what()));
  } catch (const std::exception& e) {
    throw RuntimeFailure(fmt::format("{} ({})", e.what(), what()));
  }
}

/// What `work` throws, with the op that it was for.
template <class F>
void naming(const BoundOp& op, F&& work) {
  naming([&] { return fmt::format("op {} '{}'", name_of(op->kind), op.name()); }, std::forward<F>(work));
}

}  // namespace hotbunk
