// Precompiled for the tests, which are compiled with options of their own.
#include <catch2/catch.hpp>

#include "cmake/pch/library.h"
