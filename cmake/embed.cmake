# cmake -DOUT=x.cc -DFUNCTION=f -DFILES="a.ptx;b.ptx" -P embed.cmake: a source file with
#   namespace hotbunk { std::string_view f(std::string_view name); }   the text of name's file, "" when there is none.
set(text "// Generated.\n#include <string_view>\nnamespace hotbunk {\nstd::string_view ${FUNCTION}(std::string_view name);\n")
string(APPEND text "std::string_view ${FUNCTION}(std::string_view name) {\n")
foreach(file ${FILES})
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} content)
  string(APPEND text "  if (name == \"${name}\") return R\"HOTBUNK(${content})HOTBUNK\";\n")
endforeach()
string(APPEND text "  return \"\";\n}\n}\n")
file(WRITE ${OUT} "${text}")
