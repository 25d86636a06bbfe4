// reports/assets/*, compiled in (reports/CMakeLists.txt).
#pragma once
#include <string_view>

namespace hotbunk::assets {

std::string_view style_css();
std::string_view charts_js();
std::string_view memory_js();
std::string_view report_js();
std::string_view plan_js();

}  // namespace hotbunk::assets
