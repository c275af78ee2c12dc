#!/usr/bin/env bash
# One command on one NVIDIA GPU: builds, tests and measures. docs/gpu_check.md
#
#   bash benchmarks/gpu_check.sh [STEP ...]    steps of benchmarks/gpu/check.py
#
# PYTHON names the interpreter; by default .venv's, or python3.
set -uo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/.venv/bin/python
python=$(command -v "${PYTHON:-$([[ -x $venv ]] && echo "$venv" || echo python3)}")
export PATH="$(dirname "$python"):$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
# What a shell may set, and figures would follow.
unset CUDA_LAUNCH_BLOCKING NVIDIA_TF32_OVERRIDE PYTORCH_ALLOC_CONF \
  PYTORCH_CUDA_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING TORCH_ALLOW_TF32_CUBLAS_OVERRIDE

arch=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())') || {
  echo "lowtide: gpu_check: expected torch for CUDA 13 and a GPU that it can use," \
    "got the error above. Set PYTHON." >&2
  exit 2
}
build=build/gpu
googletest=${FETCHCONTENT_SOURCE_DIR_GOOGLETEST:+"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=$FETCHCONTENT_SOURCE_DIR_GOOGLETEST"}
configure() {
  cmake -S . -B $build -G Ninja -DPython_EXECUTABLE="$python" -DLOWTIDE_CUDA=ON \
    -DLOWTIDE_CUDA_ARCHS="$arch" -DLOWTIDE_UNITY=ON -DFETCHCONTENT_FULLY_DISCONNECTED=ON \
    ${googletest:+"$googletest"} "$@"
}
tests=ON
configure -DLOWTIDE_TESTS=ON || { tests=OFF && configure -DLOWTIDE_TESTS=OFF; } || exit 2
cmake --build $build --target dev && cmake --install $build --prefix python || exit 1

failed=0
step() { "$@" || { echo "failed: $*" && failed=1; }; }
kernels=("$python" benchmarks/programs/kernels.py $((1 << 18)) 1)
if [[ $tests == ON ]]; then
  step cmake --build $build --target device_test ops_test
  step ctest --test-dir $build --verbose --no-tests=error -R '^cpp\.(device|ops)$'
  kernels=($build/ops_test '--gtest_filter=*cuda*')
else
  echo "not there: GoogleTest, so no C++ test ran" && failed=1
fi
step "$python" -u benchmarks/gpu/check.py "$@"

export PYTHONPATH=python:tests/python:benchmarks/programs
# Each tensor an allocation of its own, whose bounds memcheck sees.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
# A program that ran nothing is no answer.
sanitize() {
  local said status
  said=$(compute-sanitizer --target-processes all --error-exitcode 1 "$@" 2>&1)
  status=$?
  tail -n 40 <<<"$said"
  [[ $status == 0 && $said =~ SUMMARY:\ 0\ (errors|hazards) &&
    ! $said =~ "Running 0 tests" ]]
}
memcheck=(--tool memcheck --padding 32 --report-api-errors no)
if command -v compute-sanitizer >/dev/null; then
  step sanitize "${memcheck[@]}" --kernel-name kns=lowtide "${kernels[@]}"
  step sanitize --tool racecheck --kernel-name kns=lowtide "${kernels[@]}"
  step sanitize "${memcheck[@]}" "$python" benchmarks/programs/llama_memory.py \
    --config tiny --sequence 64 --loss vocabulary
else
  echo "not there: compute-sanitizer" && failed=1
fi
exit $failed
