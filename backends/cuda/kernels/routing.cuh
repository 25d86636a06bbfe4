// What routers' scores are formed from, in fp64.
#pragma once
#include "common.cuh"

HB_DEVICE double sigmoid_of(double x) { return 1.0 / (1.0 + exp(-x)); }
