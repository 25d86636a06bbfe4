// A pair of numbers turned by an angle.
#pragma once
#include "common.cuh"

/// {low cos - high sin, high cos + low sin}, cosine and sine times `amplitude`. sign -1: back.
HB_DEVICE float2 turned_pair(float low, float high, float angle, float amplitude, float sign) {
  const float c = amplitude * cosf(angle), s = sign * amplitude * sinf(angle);
  return {low * c - high * s, high * c + low * s};
}
