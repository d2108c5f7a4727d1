#!/bin/sh
# setup.sh - installs the Debian packages that building and testing need, if any is missing.
set -eu
need="gcc make libc6-dev libjansson-dev liblz4-dev libzstd-dev zlib1g-dev libpcre2-dev libxxhash-dev
      libcriterion-dev lz4 zstd gzip python3 python3-pip ca-certificates clang libclang-rt-14-dev
      clang-format clang-tidy cppcheck git"
missing=""
for p in $need; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $p"
done
[ -z "$missing" ] && exit 0
command -v apt-get >/dev/null || {
    echo "setup: this is no Debian system; install the equivalents of:$missing" >&2
    exit 1
}
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
echo "setup: installing$missing"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -q >/dev/null
# shellcheck disable=SC2086
$sudo apt-get install -q -y --no-install-recommends $missing >/dev/null
