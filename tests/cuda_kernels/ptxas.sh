#!/usr/bin/env bash
# What ptxas makes of every kernel, for each architecture: registers, shared bytes, spills, and how many warps of it an
# SM of sm_90a holds. Fails where one spills.
#   ptxas.sh PTXAS FOLDER_OF_PTX
#
# Warps per SM: 65,536 registers, handed out to a warp in pieces of 256, so 32 threads x registers rounded up to 8;
# 228 KiB of shared memory, 1 KiB of which each block takes for itself; 64 warps and 32 blocks at most (CUDA C++
# Programming Guide, technical specifications). Blocks are as the backend launches them at most (*_launches.cc): 128
# threads for products in bf16, attention in tiles and kernels with a warp per row and head, 32 for products in fp32, 512 or
# 1,024 for norms' backward over the widest rows, else 256.
set -euo pipefail
printf '%-36s %8s %8s %8s %14s %8s %10s\n' kernel sm_80 sm_90a sm_100 'shared bytes' threads 'warps/SM'
for file in "$2"/*.ptx; do
  for arch in sm_80 sm_90a sm_100; do
    "$1" -arch=$arch -v "$file" -o /dev/null 2>&1 | sed "s/^/$arch /"
  done
done | awk '
  function threads_of(k) {
    if (k ~ /matmul_.*f32$/ && k !~ /bf16/ || k ~ /latent_expand_f32|expert_arrivals/) return 32
    if (k ~ /sinks_backward|router_loss_sum/) return 256
    if (k ~ /matmul_|attention|^qk_norm|column_parts|vocab_log_prob|^route|^grouped_bias|latent_expand/) return 128
    if (k ~ /clip_coefficient/) return 1
    if (k ~ /^rms_norm_backward/) return 1024
    if (k ~ /^(layer|latent)_norm_backward/) return 512
    return 256
  }
  function warps_of(regs, shared, threads,    warps, blocks, limit) {
    warps = int((threads + 31) / 32)
    blocks = int(65536 / (int((regs + 7) / 8) * 8 * 32 * warps))
    limit = int(228 * 1024 / (shared + 1024)); if (limit < blocks) blocks = limit
    if (blocks > 32) blocks = 32
    if (blocks * warps > 64) blocks = int(64 / warps)
    return blocks * warps
  }
  /Compiling entry function/ { split($0, q, "\047"); kernel = q[2]; arch = $1 }
  /bytes spill stores/ { if ($0 !~ / 0 bytes spill stores/) { print kernel " spills on " arch ": " $0; bad = 1 } }
  /Used [0-9]+ registers/ {
    match($0, /Used [0-9]+/); registers[kernel, arch] = substr($0, RSTART + 5, RLENGTH - 5)
    shared[kernel] = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART, RLENGTH - 11) : 0
    names[kernel] = 1
  }
  END {
    for (k in names) {
      t = threads_of(k)
      printf "%-36s %8d %8d %8d %14d %8d %10d\n", k, registers[k, "sm_80"], registers[k, "sm_90a"],
        registers[k, "sm_100"], shared[k], t, warps_of(registers[k, "sm_90a"], shared[k], t) | "sort"
    }
    close("sort")
    exit bad
  }'
