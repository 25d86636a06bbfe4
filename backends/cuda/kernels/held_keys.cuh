// Tokens of sequences that a rank holds in parts, counted.
#pragma once
#include "backends/cuda/kernels/attention.h"
#include "common.cuh"

struct HeldKeys : hotbunk::KeyShare {
  HB_DEVICE HeldKeys() : hotbunk::KeyShare{1, 0} {}
  HB_DEVICE HeldKeys(const hotbunk::KeyShare& s) : hotbunk::KeyShare(s) {}
  /// How many of the first n positions are here: those before this rank's token of that number.
  HB_DEVICE int of(int n) const { return n > place ? (n - place - 1) / ranks + 1 : 0; }
  /// The slot here of one in a pool whose blocks have ranks block_tokens; -1: the token is another rank's, or nobody's.
  HB_DEVICE int slot(int fed, int block_tokens) const {
    const int all = ranks * block_tokens, at = fed % all;
    return fed >= 0 && at % ranks == place ? fed / all * block_tokens + at / ranks : -1;
  }
};
