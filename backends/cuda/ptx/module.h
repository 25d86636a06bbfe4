// A PTX module as plain data: what nvcc emitted, with every name resolved, ready to be executed (machine.h).
//
// Every operand is a register slot. Immediates and special registers (%tid.x, …) have slots too, filled before the
// first instruction, so that an instruction never asks what its operand is.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace hotbunk::ptx {

/// Types that an instruction computes in. b*: bits.
enum class Type : std::uint8_t {
  none,
  pred,
  b8,
  b16,
  b32,
  b64,
  u8,
  u16,
  u32,
  u64,
  s8,
  s16,
  s32,
  s64,
  f16,
  bf16,
  f16x2,
  bf16x2,
  tf32,
  f32,
  f64
};
std::string_view name_of(Type);
constexpr int bytes_of(Type type) {
  switch (type) {
    case Type::none:
    case Type::pred:
    case Type::b8:
    case Type::u8:
    case Type::s8:
      return 1;
    case Type::b16:
    case Type::u16:
    case Type::s16:
    case Type::f16:
    case Type::bf16:
      return 2;
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64:
      return 8;
    default:
      return 4;
  }
}

/// Where an address points. generic: the address itself says it (windows in warp.h).
enum class Space : std::uint8_t { generic, global, shared, local, param, constant };

enum class Opcode : std::uint8_t {
  // arithmetic: type
  add,
  sub,
  mul,
  mul_hi,
  mul_wide,
  mad,
  mad_hi,
  mad_wide,
  fma,
  div,
  rem,
  neg,
  abs,
  min,
  max,
  copysign,
  testp,
  and_,
  or_,
  xor_,
  not_,
  shl,
  shr,
  shf,
  bfe,
  bfi,
  prmt,
  lop3,
  popc,
  clz,
  brev,
  bfind,
  bfind_shift,
  rcp,
  sqrt,
  rsqrt,
  ex2,
  lg2,
  sin,
  cos,
  tanh,
  setp,
  set,
  selp,
  slct,
  cvt,
  cvt_pack,
  mov,
  pack,
  unpack,
  // memory
  ld,
  st,
  cvta,
  cvta_to,
  atom,
  red,
  cp_async,
  cp_async_commit,
  cp_async_wait,
  fence,
  prefetch,
  // control
  bra,
  ret,
  trap,
  bar_sync,
  bar_warp,
  // warp
  shfl,
  vote,
  activemask,
  match,
  redux,
  ldmatrix,
  mma,
};

enum class Round : std::uint8_t { none, rn, rz, rm, rp, rni, rzi, rmi, rpi, rna };
/// Comparisons; the last six are true when an operand is NaN.
enum class Compare : std::uint8_t { eq, ne, lt, le, gt, ge, lo, ls, hi, hs, equ, neu, ltu, leu, gtu, geu, num, nan };
enum class Combine : std::uint8_t { none, and_, or_, xor_ };  // a comparison with a further predicate
/// Sub-operations of shfl, vote, match, atom, red, redux, shf, prmt and testp.
enum class Mode : std::uint8_t {
  none,
  bfly,
  up,
  down,
  idx,
  all,
  any,
  uni,
  ballot,
  add,
  min,
  max,
  inc,
  dec,
  cas,
  exch,
  and_,
  or_,
  xor_,
  left,
  right,
  wrap,
  clamp,
  finite,
  infinite,
  number,
  notanumber,
  normal,
  subnormal,
  relu
};

using Slot = std::int32_t;
inline constexpr Slot no_slot = -1;
inline constexpr int max_destinations = 8, max_sources = 12;

struct Instruction {
  Opcode opcode = Opcode::mov;
  Type type = Type::none, from = Type::none;  // from: of cvt, set and mma's factors
  Space space = Space::generic;
  Round round = Round::none;
  Compare compare = Compare::eq;
  Combine combine = Combine::none;
  Mode mode = Mode::none;
  std::uint8_t vector = 1;  // elements that ld, st move; matrices of ldmatrix
  std::uint8_t num_destinations = 0, num_sources = 0;
  bool saturate = false, flush = false, approximate = false, transposed = false;
  bool guarded = false, guard_negated = false;
  bool source_negated = false;             // the predicate that a comparison is combined with
  std::uint8_t shape_n = 8, shape_k = 16;  // mma m16 n8 k
  Slot guard = no_slot;
  std::array<Slot, max_destinations> destination{};
  std::array<Slot, max_sources> source{};
  std::int64_t offset = 0;     // added to source[0], an address; of cp.async to the destination address
  std::int64_t offset2 = 0;    // of cp.async's source address
  std::int32_t target = -1;    // bra: index of an instruction
  std::int32_t immediate = 0;  // cp.async: bytes; wait_group: groups left; lop3: table; barrier: id
  std::int32_t line = 0;       // in the PTX text
};

/// What a slot holds before the first instruction.
enum class Special : std::uint8_t {
  tid_x,
  tid_y,
  tid_z,
  ntid_x,
  ntid_y,
  ntid_z,
  ctaid_x,
  ctaid_y,
  ctaid_z,
  nctaid_x,
  nctaid_y,
  nctaid_z,
  laneid,
  warpid,
  lanemask_eq,
  lanemask_lt,
  lanemask_le,
  lanemask_gt,
  lanemask_ge,
  clock
};

struct Variable {
  Space space = Space::shared;
  std::int64_t offset = 0;  // from the start of its space
  std::int64_t bytes = 0;   // 0: extern, as large as the launch says
  std::int64_t alignment = 1;
};

struct Parameter {
  std::string name;
  std::int64_t offset = 0, bytes = 0;
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  std::int64_t parameter_bytes = 0;
  std::int64_t shared_bytes = 0, shared_alignment = 1;  // static; dynamic shared memory begins behind it
  std::int64_t local_bytes = 0;                         // of one thread
  std::int32_t max_threads = 1024;                      // .maxntid
  std::vector<Instruction> code;
  Slot num_slots = 0;
  std::vector<std::pair<Slot, std::uint64_t>> constants;
  std::vector<std::pair<Slot, Special>> specials;
  std::vector<std::pair<Slot, std::int64_t>> globals;  // slot holds the address of module data at this offset
};

struct Module {
  std::string target;  // "sm_80"
  std::map<std::string, Kernel, std::less<>> kernels;
  std::vector<std::uint8_t> data;  // .global and .const variables of the module, initialised
  std::vector<std::string> lines;  // the text, for messages
};

/// Something that the text says and this executor does not know: never guessed.
class UnknownPtx : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Parses what nvcc -ptx emitted (PTX ISA 7 to 9). UnknownPtx, with the line, for anything outside what is implemented.
Module parse(std::string_view text);

}  // namespace hotbunk::ptx
