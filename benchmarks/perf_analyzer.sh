#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs Triton's perf_analyzer with the arguments given (--help lists them). The first use gets it:
#   benchmarks/perf_analyzer.sh --version
#
# Its binary is in the wheel perf-analyzer and wants glibc 2.38. On an older Debian it runs through the dynamic loader of
# trixie, whose packages apt gets from the mirror that it is configured with and which are unpacked beside the binary:
# nothing is installed. All lies in PERF_ANALYZER_HOME (default ~/.cache/hubkv/perf_analyzer, 40 MB); remove it to start anew.
set -euo pipefail

VERSION=2.60.0
SUITE=trixie
LIBRARIES=(libc6 libgcc-s1 libssl3t64 libstdc++6 libzstd1 zlib1g)
HOME_FOLDER=${PERF_ANALYZER_HOME:-$HOME/.cache/hubkv/perf_analyzer}
BINARY=$HOME_FOLDER/wheel/perf_analyzer/bin/perf_analyzer
ROOT=$HOME_FOLDER/$SUITE

fail()
{
    echo "perf_analyzer.sh: $*" >&2
    exit 1
}

get_binary()
{
    local scratch
    scratch=$(mktemp -d "$HOME_FOLDER/wheel.XXXXXX")
    "${PYTHON:-python3}" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux_2_38_x86_64 --dest "$scratch" "perf-analyzer==$VERSION" >&2
    "${PYTHON:-python3}" -m zipfile -e "$scratch"/*.whl "$scratch"
    chmod +x "$scratch/perf_analyzer/bin/perf_analyzer"
    rm "$scratch"/*.whl
    mv "$scratch" "$HOME_FOLDER/wheel"
}

# apt with lists and packages of its own; keys, proxies and passwords are the system's.
get_libraries()
{
    local scratch mirror package
    command -v apt-get dpkg-deb >/dev/null || fail "glibc is older than 2.38, and this is no Debian: run it in a newer container"
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m 1 '/debian/*$') \
        || fail "apt knows no mirror of Debian: run it in a container with glibc 2.38"
    scratch=$(mktemp -d "$HOME_FOLDER/$SUITE.XXXXXX")
    chmod 755 "$scratch"
    mkdir -p "$scratch/apt/lists/partial" "$scratch/apt/archives/partial" "$scratch/debs"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $SUITE main" >"$scratch/apt/sources.list"
    : >"$scratch/apt/status"
    local apt=(apt-get -qq -o "Dir::State=$scratch/apt" -o "Dir::State::status=$scratch/apt/status"
        -o "Dir::Cache=$scratch/apt" -o "Dir::Etc::sourcelist=$scratch/apt/sources.list" -o "Dir::Etc::sourceparts=-"
        -o "APT::Sandbox::User=root" -o "Acquire::Languages=none")
    "${apt[@]}" update >&2
    (cd "$scratch/debs" && "${apt[@]}" download "${LIBRARIES[@]}") >&2
    for package in "$scratch"/debs/*.deb; do
        dpkg-deb -x "$package" "$scratch"
    done
    rm -r "$scratch/apt" "$scratch/debs"
    mv "$scratch" "$ROOT"
}

mkdir -p "$HOME_FOLDER"
[[ -x $BINARY ]] || get_binary
glibc=$(getconf GNU_LIBC_VERSION | cut -d ' ' -f 2)
if [[ $(printf '%s\n2.38\n' "$glibc" | sort -V | head -n 1) == 2.38 ]]; then
    exec "$BINARY" "$@"
fi
[[ -d $ROOT ]] || get_libraries
libraries=$ROOT/usr/lib/x86_64-linux-gnu
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$BINARY" "$@"
