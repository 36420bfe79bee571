#!/usr/bin/env bash
# Build llama.cpp with CUDA as a folder that `bel-run --engine FOLDER` takes.
#
#   tests/bench/cuda_engine.sh pack SOURCE ARCHIVE.tar.xz    only what the build needs, 2 MB, to carry to another machine
#   tests/bench/cuda_engine.sh build SOURCE FOLDER           SOURCE: a folder, or such an archive
#
# SOURCE is thirdparty/llama.cpp of the xllamacpp sdist of the version that pyproject.toml pins:
#   pip download --no-deps --no-binary :all: xllamacpp==VERSION && tar xf xllamacpp-VERSION.tar.gz
# CUDA_ARCH (default: that of the GPU here, else 90), JOBS (default: all cores) and CMAKE_ARGS (more options) may be set.
# Needed: nvcc, CMake, a C++ compiler, and cuBLAS with its headers, in the toolkit or as the Python package nvidia-cublas.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }
usage() { sed -n '2,/^set/{s/^# \{0,1\}//;/^set/!p}' "$0" >&2; exit 2; }

# Parts of the source that the build reads.  Other backends and the server's libraries are left out, except for the CMake
# files and single headers that the top-level CMakeLists.txt names.
listed() {
    cd "$1"
    find CMakeLists.txt LICENSE cmake ggml/CMakeLists.txt ggml/cmake ggml/include include src vendor licenses -type f -print
    find ggml/src -maxdepth 1 -type f -print
    find ggml/src/ggml-cpu ggml/src/ggml-cuda -type f -print
}

pack() {
    local list
    list=$(mktemp)
    (listed "$1") | grep -v -e '^vendor/cpp-httplib/' -e '^ggml/src/ggml-cpu/kleidiai/' >"$list"
    tar -C "$1" -cJf "$2" -T "$list"
    rm -f "$list"
    say "$2: $(stat -c %s "$2") bytes"
}

# The newest file of a name below the places where toolkits and Python packages keep their libraries, and a toolkit's stand-in
# for the linker only where there is nothing else; nothing for none.
found() {
    local site
    site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null || true)
    find -L "${CUDA_HOME:-/usr/local/cuda}" /usr/local/cuda* /usr/local/nvidia "${site:-/nonexistent}/nvidia" /usr/lib/x86_64-linux-gnu \
        -maxdepth 6 -name "$1" -print 2>/dev/null | awk '{ print ($0 ~ /\/stubs\// ? 0 : 1) " " $0 }' | sort -k1,1n -k2,2V | tail -1 \
        | cut -d' ' -f2- || true
}

cpu_options() {  # what the compiler may assume of this machine's processor; AVX2 is ggml's default
    local pair
    for pair in avx512f:AVX512 avx512vbmi:AVX512_VBMI avx512_vnni:AVX512_VNNI avx512_bf16:AVX512_BF16 avx_vnni:AVX_VNNI; do
        if grep -qw "${pair%:*}" /proc/cpuinfo; then printf -- '-DGGML_%s=ON\n' "${pair#*:}"; fi
    done
}

# A copy of libstdc++ in each library would end the process: they hand its objects to each other.
check_compiler() {
    echo '#include <iostream>
void f() { std::cout << 1; }' | "${CXX:-c++}" -x c++ -shared -fPIC -o "$work/probe.so" -
    if ! readelf -d "$work/probe.so" | grep -q 'NEEDED.*libstdc++'; then
        say "${CXX:-c++} links libstdc++ into each library; set CC and CXX to a compiler that does not, such as /usr/bin/g++"
        exit 1
    fi
}

build() {
    local source=$1 folder=$2 cublas headers driver arch
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT  # not a local: it is read when all functions are left
    check_compiler
    if [ -f "$source" ]; then
        mkdir "$work/source"
        tar -C "$work/source" -xJf "$source"
        source=$work/source
    fi
    arch=${CUDA_ARCH:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d . || true)}
    cublas=$(found 'libcublas.so*') headers=$(found cublas_v2.h) driver=$(found 'libcuda.so*')
    say "arch ${arch:-90}, cuBLAS ${cublas:-?} with ${headers:-?}, driver ${driver:-?}"
    local options=(
        -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF -DGGML_CUDA=ON -DGGML_CUDA_FA=OFF -DGGML_CUDA_NCCL=OFF
        "-DCMAKE_CUDA_ARCHITECTURES=${arch:-90}-real" -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DGGML_CCACHE=OFF -DGGML_CUDA_COMPRESSION_MODE=none
        # The libraries stay together, wherever the folder is moved.
        '-DCMAKE_BUILD_RPATH=$ORIGIN' -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON
    )
    mapfile -t -O "${#options[@]}" options < <(cpu_options)
    [ -z "$cublas" ] || options+=("-DCUDA_cublas_LIBRARY=$cublas" "-DCMAKE_BUILD_RPATH=\$ORIGIN;$(dirname "$cublas")")
    [ -z "$headers" ] || options+=("-DCMAKE_CUDA_FLAGS=-isystem $(dirname "$headers")" "-DCMAKE_CXX_FLAGS=-isystem $(dirname "$headers")")
    [ -z "$driver" ] || options+=("-DCUDA_cuda_driver_LIBRARY=$driver")
    # shellcheck disable=SC2086
    cmake -S "$source" -B "$work/build" "${options[@]}" ${CMAKE_ARGS:-} >"$work/log" 2>&1 || { tail -40 "$work/log" >&2; exit 1; }
    [ -z "${CONFIGURE_ONLY:-}" ] || { grep -i -e cuda -e warning "$work/log" >&2; return; }
    cmake --build "$work/build" --parallel "${JOBS:-$(nproc)}" --target llama >"$work/log" 2>&1 || { tail -40 "$work/log" >&2; exit 1; }
    mkdir -p "$folder"
    cp -P "$work"/build/bin/*.so* "$folder/"
    find "$folder" -name '*.so*' -type f -exec strip --strip-unneeded {} +
    say "$folder: $(du -sh "$folder" | cut -f1)"
}

[ $# -eq 3 ] || usage
case $1 in
    pack | build) "$@" ;;
    *) usage ;;
esac
