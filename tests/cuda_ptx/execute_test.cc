// Instructions one by one, on PTX written by hand: what the ISA says they give.
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "tests/cuda_ptx/device.h"

using namespace hotbunk::ptx;

namespace {

/// Runs `body` with 32 threads; each stores %r0 .. of type `type` from register %out to out[tid].
template <class T>
std::vector<T> run(const std::string& type, const std::string& body, std::uint32_t threads = 32,
                   std::uint32_t blocks = 1) {
  const std::string text =
      ".version 9.0\n.target sm_80\n.address_size 64\n"
      ".visible .entry k(.param .u64 k_param_0)\n{\n"
      ".reg .pred %p<10>;\n.reg .b16 %h<10>;\n.reg .b32 %r<20>;\n.reg .f32 %f<20>;\n.reg .f64 %d<10>;\n.reg .b64 "
      "%rd<20>;\n"
      "mov.u32 %r0, %tid.x;\n" +
      body +
      "\nld.param.u64 %rd0, [k_param_0];\ncvta.to.global.u64 %rd0, %rd0;\nmov.u32 %r1, %ctaid.x;\nmov.u32 %r2, "
      "%ntid.x;\n"
      "mad.lo.s32 %r1, %r1, %r2, %r0;\nmul.wide.u32 %rd1, %r1, " +
      std::to_string(sizeof(T)) + ";\nadd.s64 %rd0, %rd0, %rd1;\nst.global." + type + " [%rd0], " +
      (sizeof(T) == 8 && type != "f64" ? "%rd9"
       : type == "f64"                 ? "%d9"
       : type == "f32"                 ? "%f9"
       : sizeof(T) == 2                ? "%h9"
                                       : "%r9") +
      ";\nret;\n}\n";
  const Module module = parse(text);
  DeviceMemory memory;
  Machine machine(module, memory);
  Array<T> out(memory, "out", threads * blocks);
  T* const pointer = out.begin();
  const Arguments arguments(pointer);
  machine.launch("k", {{blocks}, {threads}, 0, arguments.bytes()});
  return out.values();
}

Check check_of(const std::string& body, std::uint32_t threads = 32) {
  try {
    run<std::uint32_t>("u32", body, threads);
  } catch (const Finding& f) {
    INFO(f.what());
    return f.check();
  }
  FAIL("no finding");
  return Check::launch;
}

}  // namespace

TEST_CASE("integers wrap, shift and extract as the ISA says", "[ptx]") {
  CHECK(run<std::uint32_t>("u32", "mul.lo.u32 %r9, 65537, 65537;")[0] == 131073u);  // 2^32 + 2^17 + 1
  CHECK(run<std::uint32_t>("u32", "mul.hi.u32 %r9, -1, -1;")[0] == 0xfffffffeu);
  CHECK(run<std::int64_t>("u64", "mul.wide.s32 %rd9, -3, 5;")[0] == -15);
  CHECK(run<std::uint32_t>("u32", "shl.b32 %r9, 1, 32;")[0] == 0u);  // clamped, not masked
  CHECK(run<std::uint32_t>("u32", "shr.s32 %r9, -8, 40;")[0] == 0xffffffffu);
  CHECK(run<std::uint32_t>("u32", "shf.l.wrap.b32 %r9, 0x80000001, 0x7, 4;")[0] ==
        0x78u);  // high half of 7:80000001 << 4
  CHECK(run<std::uint32_t>("u32", "bfe.u32 %r9, 0xabcd1234, 8, 8;")[0] == 0x12u);
  CHECK(run<std::uint32_t>("u32", "bfe.s32 %r9, 0x0000f000, 12, 4;")[0] == 0xffffffffu);
  CHECK(run<std::uint32_t>("u32", "bfi.b32 %r9, 0xff, 0x0, 4, 8;")[0] == 0xff0u);
  CHECK(run<std::uint32_t>("u32", "prmt.b32 %r9, 0x33221100, 0x77665544, 0x7531;")[0] == 0x77553311u);
  CHECK(run<std::uint32_t>("u32", "lop3.b32 %r9, 0xf0f0f0f0, 0xcccccccc, 0xaaaaaaaa, 0x96;")[0] ==
        (0xf0f0f0f0u ^ 0xccccccccu ^ 0xaaaaaaaau));
  CHECK(run<std::uint32_t>("u32", "clz.b32 %r9, 0x10;")[0] == 27u);
  CHECK(run<std::uint32_t>("u32", "bfind.shiftamt.u32 %r9, 0x10;")[0] == 27u);
  CHECK(run<std::uint32_t>("u32", "bfind.shiftamt.u32 %r9, 0x0;")[0] == 0xffffffffu);
  CHECK(run<std::uint32_t>("u32", "brev.b32 %r9, 0x1;")[0] == 0x80000000u);
  CHECK(run<std::int32_t>("u32", "div.s32 %r9, -7, 2;")[0] == -3);
  CHECK(run<std::int32_t>("u32", "rem.s32 %r9, -7, 2;")[0] == -1);
}

TEST_CASE("what is loaded is extended to the register's width by its type's sign", "[ptx]") {
  const auto loaded = [](const std::string& type) {
    return run<std::int64_t>("u64",
                             ".shared .align 4 .b8 s[128];\nmov.u32 %r3, s;\nshl.b32 %r4, %r0, 2;\n"
                             "add.u32 %r3, %r3, %r4;\nmov.u32 %r5, -7;\nst.shared.u32 [%r3], %r5;\nld.shared." +
                                 type + " %rd9, [%r3];")[0];
  };
  CHECK(loaded("s32") == -7);
  CHECK(loaded("s16") == -7);
  CHECK(loaded("s8") == -7);
  CHECK(loaded("u32") == 0xfffffff9);
  CHECK(loaded("u8") == 0xf9);
}

TEST_CASE("floats round, saturate and compare as the ISA says", "[ptx]") {
  CHECK(run<float>("f32", "fma.rn.f32 %f9, 0f3f800001, 0f3f800001, 0fbf800002;")[0] == 0x1p-46f);  // one rounding
  CHECK(run<float>("f32", "add.rm.f32 %f9, 0f3f800000, 0f2f800000;")[0] == 1.0f);
  CHECK(run<float>("f32", "add.rp.f32 %f9, 0f3f800000, 0f2f800000;")[0] == std::nextafter(1.0f, 2.0f));
  CHECK(run<float>("f32", "add.sat.f32 %f9, 0f3f800000, 0f3f800000;")[0] == 1.0f);
  CHECK(run<float>("f32", "min.f32 %f9, 0f7fc00000, 0f40000000;")[0] == 2.0f);  // the number wins
  CHECK(run<float>("f32", "max.f32 %f9, 0f80000000, 0f00000000;")[0] == 0.0f);
  CHECK(run<float>("f32", "ex2.approx.ftz.f32 %f9, 0f40400000;")[0] == 8.0f);
  CHECK(run<float>("f32", "copysign.f32 %f9, 0fbf800000, 0f40000000;")[0] == -2.0f);
  CHECK(run<std::uint32_t>("u32", "setp.ltu.f32 %p1, 0f7fc00000, 0f00000000; selp.u32 %r9, 1, 0, %p1;")[0] == 1u);
  CHECK(run<std::uint32_t>("u32", "setp.lt.f32 %p1|%p2, 0f7fc00000, 0f00000000; selp.u32 %r9, 1, 0, %p2;")[0] == 1u);
}

TEST_CASE("conversions round once", "[ptx]") {
  CHECK(run<std::int32_t>("u32", "cvt.rni.s32.f32 %r9, 0f40200000;")[0] == 2);  // 2.5: ties to even
  CHECK(run<std::int32_t>("u32", "cvt.rzi.s32.f32 %r9, 0fcf800000;")[0] == std::numeric_limits<std::int32_t>::min());
  CHECK(run<std::uint32_t>("u32", "cvt.rzi.u32.f32 %r9, 0fbf800000;")[0] == 0u);
  CHECK(run<std::uint16_t>("u16", "cvt.rn.bf16.f32 %h9, 0f3f808000;")[0] == 0x3f80u);  // halfway: even
  CHECK(run<std::uint16_t>("u16", "cvt.rn.bf16.f32 %h9, 0f3f818000;")[0] == 0x3f82u);
  CHECK(run<std::uint16_t>("u16", "cvt.rn.f16.f32 %h9, 0f477ff000;")[0] == 0x7c00u);  // 65520: infinity
  CHECK(run<std::uint16_t>("u16", "cvt.rn.f16.f32 %h9, 0f33800000;")[0] == 0x0001u);  // 2^-24: the least subnormal
  CHECK(run<std::uint32_t>("u32", "cvt.rn.bf16x2.f32 %r9, 0f3f800000, 0f40000000;")[0] == 0x3f804000u);
  // Towards zero where that is named: nothing becomes larger, and no number becomes infinite.
  CHECK(run<std::uint16_t>("u16", "cvt.rz.bf16.f32 %h9, 0f3f81ffff;")[0] == 0x3f81u);
  CHECK(run<std::uint16_t>("u16", "cvt.rz.bf16.f32 %h9, 0fbf81ffff;")[0] == 0xbf81u);
  CHECK(run<std::uint16_t>("u16", "cvt.rz.bf16.f32 %h9, 0f7f7fffff;")[0] == 0x7f7fu);
  CHECK(run<std::uint32_t>("u32", "cvt.rz.bf16x2.f32 %r9, 0f3f81ffff, 0f40000000;")[0] == 0x3f814000u);
  CHECK(run<std::uint16_t>("u16", "cvt.rz.f16.f32 %h9, 0f477ff000;")[0] == 0x7bffu);
  CHECK(run<std::uint16_t>("u16", "cvt.rm.f16.f32 %h9, 0fc77ff000;")[0] == 0xfc00u);  // below the lowest: -infinity
  CHECK(run<std::uint32_t>("u32", "cvt.rna.tf32.f32 %r9, 0f3f801000;")[0] == 0x3f802000u);  // halfway: away from zero
  CHECK(run<std::uint32_t>("u32", "cvt.rn.tf32.f32 %r9, 0f3f801000;")[0] == 0x3f800000u);
  CHECK(run<std::uint16_t>("u16", "cvt.rn.relu.bf16.f32 %h9, 0fbf800000;")[0] == 0u);
  CHECK(run<std::uint16_t>("u16", "cvt.rn.relu.bf16.f32 %h9, 0f80000000;")[0] == 0u);  // -0 becomes +0
  CHECK(run<std::uint16_t>("u16", "cvt.rn.relu.bf16.f32 %h9, 0f7fc00000;")[0] == 0x7fffu);
  CHECK(run<std::uint32_t>("u32", "cvt.rn.relu.bf16x2.f32 %r9, 0f80000000, 0fffc00000;")[0] == 0x00007fffu);
  CHECK(run<float>("f32", "cvt.rn.f32.u64 %f9, 0xffffffffffffffff;")[0] == 18446744073709551616.0f);
  CHECK(run<std::uint32_t>("u32", "mov.b32 %h1, 0; cvt.s32.s8 %r9, 0x80;")[0] == 0xffffff80u);
}

TEST_CASE("lanes part at a branch and meet again behind it", "[ptx]") {
  // Odd lanes loop as often as their number, even ones not at all; all then vote together.
  const auto out = run<std::uint32_t>("u32", R"(
    mov.u32 %r9, 0;
    and.b32 %r3, %r0, 1;
    setp.eq.s32 %p1, %r3, 0;
    @%p1 bra $join;
    mov.u32 %r4, %r0;
  $loop:
    add.s32 %r9, %r9, 2;
    sub.s32 %r4, %r4, 1;
    setp.ne.s32 %p2, %r4, 0;
    @%p2 bra $loop;
  $join:
    vote.sync.ballot.b32 %r5, %p1, -1;
    add.s32 %r9, %r9, %r5;)");
  for (std::uint32_t l = 0; l < 32; ++l) CHECK(out[l] == 0x55555555u + (l % 2 == 1 ? 2 * l : 0));
}

TEST_CASE("shuffles take what the named lanes hold", "[ptx]") {
  const auto bfly = run<std::uint32_t>("u32", "shfl.sync.bfly.b32 %r9, %r0, 5, 31, -1;");
  const auto down = run<std::uint32_t>("u32", "shfl.sync.down.b32 %r9|%p1, %r0, 3, 31, -1;");
  const auto up8 = run<std::uint32_t>("u32", "shfl.sync.up.b32 %r9, %r0, 1, 0x1800, -1;");  // in segments of eight
  const auto idx = run<std::uint32_t>("u32", "shfl.sync.idx.b32 %r9, %r0, 7, 31, -1;");
  for (std::uint32_t l = 0; l < 32; ++l) {
    CHECK(bfly[l] == (l ^ 5u));
    CHECK(down[l] == (l + 3 < 32 ? l + 3 : l));
    CHECK(up8[l] == (l % 8 == 0 ? l : l - 1));
    CHECK(idx[l] == 7u);
  }
  CHECK(run<std::uint32_t>("u32", "redux.sync.add.s32 %r9, %r0, -1;")[4] == 31u * 32u / 2);
  CHECK(run<std::uint32_t>("u32", "match.any.sync.b32 %r9, %r0, -1;")[4] == 1u << 4);
}

TEST_CASE("shared memory carries values over a barrier, over several warps", "[ptx]") {
  const auto out = run<std::uint32_t>("u32", R"(
    .shared .align 4 .b8 s[512];
    mov.u32 %r3, s;
    shl.b32 %r4, %r0, 2;
    add.s32 %r5, %r3, %r4;
    st.shared.u32 [%r5], %r0;
    bar.sync 0;
    mov.u32 %r6, 127;
    sub.s32 %r6, %r6, %r0;
    shl.b32 %r6, %r6, 2;
    add.s32 %r6, %r3, %r6;
    ld.shared.u32 %r9, [%r6];)",
                                      128, 3);
  for (std::uint32_t t = 0; t < 384; ++t) CHECK(out[t] == 127 - t % 128);
}

TEST_CASE("atomics of all threads arrive", "[ptx]") {
  const auto out = run<std::uint32_t>("u32", R"(
    .shared .align 4 .b8 s[4];
    setp.ne.s32 %p1, %r0, 0;
    @!%p1 st.shared.u32 [s], 5;
    bar.sync 0;
    atom.shared.add.u32 %r3, [s], 2;
    bar.sync 0;
    ld.shared.u32 %r9, [s];)",
                                      96);
  CHECK(out[0] == 5u + 2u * 96u);
  CHECK(out[95] == out[0]);
}

TEST_CASE("what a GPU leaves undefined is found and named", "[ptx]") {
  const std::string shared =
      ".shared .align 4 .b8 s[128]; mov.u32 %r3, s; shl.b32 %r4, %r0, 2; add.s32 %r5, %r3, %r4; mov.u32 %r9, 0;";
  CHECK(check_of("ld.global.u32 %r9, [%rd5];") == Check::out_of_bounds);
  CHECK(check_of(shared + "st.shared.u32 [%r5+4], %r0;") == Check::out_of_bounds);
  CHECK(check_of(shared + "st.shared.u32 [%r5+2], %r0;") == Check::misaligned);
  CHECK(check_of(shared + "ld.shared.u32 %r9, [%r5];") == Check::uninitialised);
  CHECK(check_of(shared + "st.shared.u32 [s], %r0;") == Check::shared_race);  // all lanes, one word
  CHECK(check_of(shared + "st.shared.u32 [%r5], %r0; ld.shared.u32 %r9, [s+8];") == Check::shared_race);
  CHECK(check_of(shared + "setp.eq.s32 %p1, %r0, 3; @%p1 bar.sync 0;") == Check::barrier);
  CHECK(check_of("mov.u32 %r9, 0; setp.lt.s32 %p1, %r0, 16; @%p1 shfl.sync.bfly.b32 %r9, %r0, 1, 31, -1;") ==
        Check::warp_operation);
  CHECK(check_of("mov.u32 %r9, 0; setp.eq.s32 %p1, %r0, 3; @%p1 trap;") == Check::trap);
  CHECK_THROWS_AS(run<std::uint32_t>("u32", "mov.u32 %r9, 0;", 2048), Finding);
}

TEST_CASE("with the order that is missing, the same code is sound", "[ptx]") {
  const std::string shared = ".shared .align 4 .b8 s[128]; mov.u32 %r3, s; shl.b32 %r4, %r0, 2; add.s32 %r5, %r3, %r4;";
  CHECK(run<std::uint32_t>("u32",
                           shared + "st.shared.u32 [%r5], %r0; bar.warp.sync -1; ld.shared.u32 %r9, [s+8];")[5] == 2u);
  CHECK(run<std::uint32_t>("u32", shared + "st.shared.u32 [%r5], %r0; bar.sync 0; ld.shared.u32 %r9, [s+8];")[5] == 2u);
}

TEST_CASE("what is not known is an error with its line, never a guess", "[ptx]") {
  CHECK_THROWS_WITH(run<std::uint32_t>("u32", "frobnicate.u32 %r9, 1;"),
                    Catch::Contains("line 13") && Catch::Contains("frobnicate"));
  CHECK_THROWS_WITH(run<std::uint32_t>("u32", "add.rz.magic.u32 %r9, 1, 2;"), Catch::Contains("magic"));
  CHECK_THROWS_WITH(run<std::uint32_t>("u32", "mov.u32 %r9, %unknown;"), Catch::Contains("%unknown"));
  CHECK_THROWS_WITH(run<std::uint32_t>("u32", "bra $nowhere;"), Catch::Contains("$nowhere"));
}
