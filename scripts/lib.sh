# Shared by the scripts: installs what the build needs, and builds. Sourced, not run.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Debian 12 packages; everything else in the tree builds from these.
packages=(g++ cmake ninja-build ccache git ca-certificates python3
  libgloo-dev libyaml-cpp-dev nlohmann-json3-dev libfmt-dev libdnnl-dev librapidcheck-dev
  libeigen3-dev libboost-graph-dev libcli11-dev catch2 libbenchmark-dev libxxhash-dev libexpected-dev)

install_packages() {
  local missing=()
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q "install ok installed" || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  echo "installing: ${missing[*]}" >&2
  local sudo=""
  if [ "$(id -u)" -ne 0 ]; then sudo="sudo"; fi
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

# build DIR TARGET...: configures once, then builds.
build() {
  local dir="$1"
  shift
  mkdir -p "$dir"
  cmake -S "$root" -B "$dir" -G Ninja ${HOTBUNK_CMAKE_ARGS:-} >"$dir/configure.log" 2>&1 || {
    cat "$dir/configure.log" >&2
    return 1
  }
  cmake --build "$dir" --target "$@" >&2
}
