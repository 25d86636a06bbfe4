# One way to declare a library, a test and a benchmark, so that each folder's CMakeLists.txt is a few lines.

add_library(hotbunk_options INTERFACE)
target_include_directories(hotbunk_options INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(hotbunk_options INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor -fno-omit-frame-pointer)
if(HOTBUNK_WERROR)
  target_compile_options(hotbunk_options INTERFACE -Werror)
endif()
if(CMAKE_UNITY_BUILD)  # gcc takes a source file that another one includes for a header
  target_compile_options(hotbunk_options INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endif()
if(HOTBUNK_SANITIZE)
  # GCC's checks of uninitialised use go wrong in instrumented code (std::regex, for one).
  target_compile_options(hotbunk_options INTERFACE -fsanitize=${HOTBUNK_SANITIZE} -fno-sanitize-recover=all
                                                   -Wno-maybe-uninitialized)
  target_link_options(hotbunk_options INTERFACE -fsanitize=${HOTBUNK_SANITIZE})
endif()
# GCC sweeps its memory each time it has doubled, in these units for a twentieth of its time; a unit takes up to 2.1 GB without.
target_compile_options(hotbunk_options INTERFACE
  "$<$<CXX_COMPILER_ID:GNU>:SHELL:--param ggc-min-heapsize=2097152>")
# Some forty programs take in the libraries' debug information: lld links one in a third of GNU ld's CPU time.
find_program(HOTBUNK_LLD ld.lld)
if(HOTBUNK_LLD)
  target_link_options(hotbunk_options INTERFACE -fuse-ld=lld)
endif()
target_compile_definitions(hotbunk_options INTERFACE HOTBUNK_VERSION="${PROJECT_VERSION}")
target_link_libraries(hotbunk_options INTERFACE fmt::fmt Threads::Threads)

# Half of what a compiler does in this tree is to read the standard library, fmt and Catch2: read once for the libraries,
# once for the tests (other options: a precompiled header fits only the options that it was made with).
# CMAKE_DISABLE_PRECOMPILE_HEADERS=ON builds without; scripts/lint does, which finds an include that a unit forgot.
function(hotbunk_precompiled name)
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/pch/${name}.cc CONTENT "")
  add_library(hotbunk_pch_${name} OBJECT ${CMAKE_BINARY_DIR}/pch/${name}.cc)
  target_link_libraries(hotbunk_pch_${name} PRIVATE hotbunk_options ${ARGN})
  # In angle brackets: without a path of this tree ccache finds what another work tree compiled.
  target_precompile_headers(hotbunk_pch_${name} PRIVATE <cmake/pch/${name}.h>)
  target_compile_options(hotbunk_pch_${name} PRIVATE "$<$<CXX_COMPILER_ID:Clang>:SHELL:-Xclang -fno-pch-timestamp>")
endfunction()
# What is compiled more often than it runs long. -Og takes a quarter off the compiler's time under -O1; its test of
# uninitialised use, made for -O2, reports std::optional there.
set(HOTBUNK_BRIEF_OPTIONS -Og $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)

# Of tests the library is what needs the optimiser. And no CHECK needs a try block of its own: an exception ends its test
# case.
set(HOTBUNK_TEST_OPTIONS ${HOTBUNK_BRIEF_OPTIONS} -g0 -DCATCH_CONFIG_FAST_COMPILE)
hotbunk_precompiled(library)
hotbunk_precompiled(test Catch2::Catch2)
target_compile_options(hotbunk_pch_test PRIVATE ${HOTBUNK_TEST_OPTIONS})

# Of what reads files and writes answers nothing runs long: compiled in two thirds of the time. The precompiled header of
# the libraries fits, for it has no code of its own.
list(TRANSFORM HOTBUNK_BRIEF_OPTIONS REPLACE "(.+)" "$<$<CONFIG:RelWithDebInfo>:\\1>" OUTPUT_VARIABLE HOTBUNK_COLD_OPTIONS)

# hotbunk_library(name [COLD] [FOLDERS ...] [COLD_PARTS ...] [DEPS ...]): every *.cc of this folder, and of the subfolders
# named, becomes hotbunk_<name>. COLD: all of it with the cold options; COLD_PARTS: these files of it (patterns).
function(hotbunk_library name)
  cmake_parse_arguments(ARG "COLD" "" "FOLDERS;COLD_PARTS;DEPS" ${ARGN})
  set(patterns ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  foreach(folder ${ARG_FOLDERS})
    list(APPEND patterns ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cc)
  endforeach()
  file(GLOB sources CONFIGURE_DEPENDS ${patterns})
  if(NOT sources)  # headers only
    add_library(hotbunk_${name} INTERFACE)
    target_link_libraries(hotbunk_${name} INTERFACE hotbunk_options ${ARG_DEPS})
    return()
  endif()
  if(ARG_COLD_PARTS)
    list(TRANSFORM ARG_COLD_PARTS PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
    file(GLOB cold_sources CONFIGURE_DEPENDS ${ARG_COLD_PARTS})
    list(REMOVE_ITEM sources ${cold_sources})
    add_library(hotbunk_${name}_cold OBJECT ${cold_sources})
    target_link_libraries(hotbunk_${name}_cold PUBLIC hotbunk_options ${ARG_DEPS})
    target_precompile_headers(hotbunk_${name}_cold REUSE_FROM hotbunk_pch_library)
    target_compile_options(hotbunk_${name}_cold PRIVATE ${HOTBUNK_COLD_OPTIONS})
    list(APPEND sources $<TARGET_OBJECTS:hotbunk_${name}_cold>)
  endif()
  add_library(hotbunk_${name} STATIC ${sources})
  target_link_libraries(hotbunk_${name} PUBLIC hotbunk_options ${ARG_DEPS})
  target_precompile_headers(hotbunk_${name} REUSE_FROM hotbunk_pch_library)
  if(ARG_COLD)
    target_compile_options(hotbunk_${name} PRIVATE ${HOTBUNK_COLD_OPTIONS})
  endif()
endfunction()

# Catch2's main is slow to compile: once for all test programs.
add_library(hotbunk_test_main STATIC ${PROJECT_SOURCE_DIR}/tests/main.cc ${PROJECT_SOURCE_DIR}/tests/paths.cc)
target_link_libraries(hotbunk_test_main PUBLIC hotbunk_options Catch2::Catch2)
target_compile_options(hotbunk_test_main PRIVATE ${HOTBUNK_TEST_OPTIONS})
set_source_files_properties(${PROJECT_SOURCE_DIR}/tests/paths.cc PROPERTIES
  COMPILE_DEFINITIONS "HOTBUNK_SOURCE_DIR=\"${PROJECT_SOURCE_DIR}\";HOTBUNK_BINARY_DIR=\"${PROJECT_BINARY_DIR}\"")

# Tests share the cores with each other: a team of threads that waits must not spin on them. A run of one rank under two
# test programs took 55 s of CPU where it takes 3.5.
set(HOTBUNK_TEST_ENVIRONMENT OMP_WAIT_POLICY=passive)

# hotbunk_test(folder [DEPS ...] [TIMEOUT s] [COST s]): every *_test.cc of tests/<folder> becomes one Catch2 program and
# one CTest per program. COST: about how long it takes; the longest start first, so that none runs alone at the end.
function(hotbunk_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT;COST" "DEPS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*_test.cc)
  string(REPLACE "/" "_" target ${name})
  add_executable(${target}_test ${sources})
  target_link_libraries(${target}_test PRIVATE hotbunk_options hotbunk_test_main rapidcheck ${ARG_DEPS})
  target_compile_options(${target}_test PRIVATE ${HOTBUNK_TEST_OPTIONS})
  target_precompile_headers(${target}_test REUSE_FROM hotbunk_pch_test)
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(HOTBUNK_SANITIZE)  # instrumented code is several times slower, and where ranks share cores many times
    math(EXPR ARG_TIMEOUT "10 * ${ARG_TIMEOUT}")
  endif()
  if(NOT ARG_COST)
    set(ARG_COST 5)
  endif()
  add_test(NAME ${name} COMMAND ${target}_test)
  set_tests_properties(
    ${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} COST ${ARG_COST} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
                       ENVIRONMENT "${HOTBUNK_TEST_ENVIRONMENT}")
endfunction()

# hotbunk_test_lowered(name ISA [cases]): the same program once more, as `name_ISA`, with oneDNN and our choice of products
# lowered to that; all of its cases, or those that Catch finds by `cases`. A CPU without AVX-512 has nothing to lower:
# it would do again, bit for bit, what it has just done, and says `skipped`.
function(hotbunk_test_lowered name isa)
  string(REPLACE "/" "_" target ${name})
  get_test_property(${name} TIMEOUT timeout)
  set(cost 20)
  if(NOT ARGN)
    get_test_property(${name} COST cost)
  endif()
  add_test(NAME ${name}_${isa} COMMAND sh -c
    [[grep -qw avx512f /proc/cpuinfo && exec "$0" "$@" || { echo "this CPU has no AVX-512 to be lowered"; exit 77; }]]
    $<TARGET_FILE:${target}_test> ${ARGN})
  set_tests_properties(
    ${name}_${isa} PROPERTIES TIMEOUT ${timeout} COST ${cost} SKIP_RETURN_CODE 77 WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
                              ENVIRONMENT "${HOTBUNK_TEST_ENVIRONMENT};ONEDNN_MAX_CPU_ISA=${isa}")
endfunction()

# hotbunk_bench(name [DEPS ...]): bench/<name>.cc with Google Benchmark.
function(hotbunk_bench name)
  cmake_parse_arguments(ARG "" "" "DEPS" ${ARGN})
  add_executable(bench_${name} ${name}.cc)
  target_link_libraries(bench_${name} PRIVATE hotbunk_options benchmark::benchmark ${ARG_DEPS})
  target_precompile_headers(bench_${name} REUSE_FROM hotbunk_pch_library)
  target_compile_options(bench_${name} PRIVATE ${HOTBUNK_COLD_OPTIONS})  # what it measures is in the libraries
endfunction()
