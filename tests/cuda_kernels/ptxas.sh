#!/usr/bin/env bash
# What ptxas makes of every kernel, for each architecture: registers, shared bytes, spills. Fails where one spills.
#   ptxas.sh PTXAS FOLDER_OF_PTX
set -euo pipefail
printf '%-36s %8s %8s %8s %14s\n' kernel sm_80 sm_90 sm_100 'shared bytes'
for file in "$2"/*.ptx; do
  for arch in sm_80 sm_90 sm_100; do
    "$1" -arch=$arch -v "$file" -o /dev/null 2>&1 | sed "s/^/$arch /"
  done
done | awk '
  /Compiling entry function/ { split($0, q, "\047"); kernel = q[2]; arch = $1 }
  /bytes spill stores/ { if ($0 !~ / 0 bytes spill stores/) { print kernel " spills on " arch ": " $0; bad = 1 } }
  /Used [0-9]+ registers/ {
    match($0, /Used [0-9]+/); registers[kernel, arch] = substr($0, RSTART + 5, RLENGTH - 5)
    shared[kernel] = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART, RLENGTH - 11) : 0
    names[kernel] = 1
  }
  END {
    for (k in names) printf "%-36s %8d %8d %8d %14d\n", k, registers[k, "sm_80"], registers[k, "sm_90"], registers[k, "sm_100"], shared[k] | "sort"
    close("sort")
    exit bad
  }'
