#!/usr/bin/env bash
# What a GPU has to show, in one command and without network: build, every kernel against its twin, the tests on the GPU,
# compute-sanitizer, the benchmarks and the paper's scale. The most valuable comes first, and each step's output is in the folder as
# soon as it is done, so that what was reached when time is up is kept.
#
#   benchmarks/gpu_check.sh [FOLDER]     default: benchmarks/results/<device>-<date>
#   LIMIT=540                            seconds in all
#   ONLY="STEP STEP"                     these steps alone, behind the builds; for what an earlier run had no time for
#   ARCHIVE=FILE                         after each step the whole folder, as a .tar.gz
#   COMMIT=ID                            what this is a copy of, where it has no history
#
# Needs torch >= 2.11 with CUDA, nvcc, numpy, tqdm, scikit-learn, setuptools >= 77, ninja, pytest >= 8.2 and pytest-benchmark. Nothing
# is installed: the package goes to a temporary folder.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
limit=${LIMIT:-540}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A step that hangs leaves what it said, and where it was.
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 MPLBACKEND=Agg
command -v python >/dev/null || PATH="$(python3 -c 'import sys; print(sys.prefix)')/bin:$PATH"
export PATH="$PATH:/usr/local/cuda/bin"

device=$(python -c "import torch; print(torch.cuda.get_device_name().replace(' ', '-').lower())") || {
  echo "gpu_check.sh: torch finds no CUDA device" >&2
  exit 1
}
python -c "
import numpy, pytest, pytest_benchmark, setuptools, sklearn, tqdm
for package, least in ((setuptools, (77,)), (pytest, (8, 2))):
    version = tuple(map(int, package.__version__.split('.')[:2]))
    assert version >= least, f'{package.__name__} {package.__version__} is too old'
" || {
  echo "gpu_check.sh: a package that it needs is missing or too old (see its first lines)" >&2
  exit 1
}
for tool in nvcc ninja compute-sanitizer; do
  command -v "$tool" >/dev/null || echo "gpu_check.sh: $tool is not on the path" >&2
done
capability=$(python -c "import torch; print('%d.%d' % torch.cuda.get_device_capability())")
out=${1:-benchmarks/results/$device-$(date +%Y-%m-%d)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
{
  date -u +%Y-%m-%dT%H:%M:%SZ
  if [[ -n ${COMMIT:-} ]]; then
    echo "commit $COMMIT"
  elif git rev-parse HEAD >/dev/null 2>&1; then
    echo "commit $(git rev-parse HEAD)$(git diff --quiet HEAD || echo ', changed')"
  else
    echo "commit unknown"
  fi
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,mig.mode.current --format=csv
  nvcc --version | tail -n 2
  python -c "import sys, torch; print('python', sys.version.split()[0], 'torch', torch.__version__, 'CUDA', torch.version.cuda)"
} >"$out/machine.txt" 2>&1
printf 'step\texit\tseconds\n' >"$out/steps.tsv"
failed=0

# step NAME SECONDS COMMAND...: run it within its seconds and those left, output to NAME.txt. Where they are over it is interrupted,
# as by Ctrl-C, on which pytest writes its report.
step() {
  local name=$1 most=$2 start=$SECONDS left=$((limit - SECONDS)) code=0
  shift 2
  if [[ -n ${ONLY:-} && $name != build* && " $ONLY " != *" $name "* ]]; then return; fi
  if ((left < 10)); then
    printf '%s\tno time left\t0\n' "$name" | tee -a "$out/steps.tsv"
    failed=1
    return
  fi
  timeout --signal=INT --kill-after=20 "$((most < left ? most : left))" "$@" >"$out/$name.txt" 2>&1 || code=$?
  ((code == 0)) || failed=1
  printf '%s\t%d\t%d\n' "$name" "$code" "$((SECONDS - start))" | tee -a "$out/steps.tsv"
  if [[ -n ${ARCHIVE:-} ]]; then tar czf "$ARCHIVE" -C "$out" .; fi
  return "$code"
}

# build FOLDER ARCH: the package there, from the present folder.
build() {
  ELLA_CUDA=1 TORCH_CUDA_ARCH_LIST=$2 python -m pip install -v --no-build-isolation --no-deps --target "$1" .
}
export -f build

# Compute capability 9.0 alone has the kernels of warpgroups, in a build of their own: at the same time, from a copy.
if [[ $capability == 9.0 ]]; then
  mkdir "$work/copy"
  tar cf - --exclude=./.git --exclude=./build . | tar xf - -C "$work/copy"
  (
    cd "$work/copy" || exit 1
    code=0
    build "$work/site_9.0a" 9.0a >"$work/build_9.0a.txt" 2>&1 || code=$?
    echo "$code" >"$work/code"
  ) &
fi
if ! step build 240 bash -c "build '$work/site' '$capability'"; then
  tail -n 40 "$out/build.txt"
  exit 1
fi
export PYTHONPATH=$work/site
# Not the checkout's own, unbuilt package: python -c and -m put the present folder first on the path.
kernels=(python -c "import faulthandler, sys; sys.path.pop(0)
faulthandler.dump_traceback_later(45)
from ella_cuda.cli import main
sys.exit(main(['info']))")
tests=(python -c "import sys; sys.path.pop(0)
import pytest
sys.exit(pytest.main(sys.argv[1:]))" -q -p no:cacheprovider -o faulthandler_timeout=40)
# Calls that fail are torch's own questions, and what of ours fails raises.
sanitizer=(compute-sanitizer --report-api-errors no --error-exitcode 1 --print-limit 20)
ours=(--kernel-regex kns=ella)

step kernels 60 "${kernels[@]}"
step tests_first 60 "${tests[@]}" -k cuda python_tests/ops/test_streams.py python_tests/training/test_graph.py \
  python_tests/laplace/test_eigenvalues.py
if [[ $capability == 9.0 ]]; then
  step build_9.0a 120 bash -c "until [[ -s '$work/code' ]]; do sleep 1; done; cat '$work/build_9.0a.txt'; exit \$(<'$work/code')"
  step archs_9.0a 30 env PYTHONPATH="$work/site_9.0a" \
    python -c "import sys; sys.path.pop(0); import ella_cuda; i = ella_cuda.build_info(); assert '9.0a' in i['cuda_archs'], i"
  step kernels_9.0a 60 env PYTHONPATH="$work/site_9.0a" "${kernels[@]}"
  step tests_9.0a 40 env PYTHONPATH="$work/site_9.0a" "${tests[@]}" -k "cuda and kron_accumulate" python_tests/ops
fi
step memcheck 100 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${sanitizer[@]}" "${ours[@]}" --tool memcheck "${kernels[@]}"
# A file after the other in order of worth. What torch compiles takes seconds a row, and comes later; the convolutions themselves
# are torch's on CUDA.
files=()
for name in training_step factored_linear kron_accumulate factors evidence_step strided_conv circular_pad; do
  files+=("benchmarks/bench_$name.py")
done
step benchmarks 120 "${tests[@]}" "${files[@]}" -k "not compile" --device cuda \
  --benchmark-json "$out/benchmarks.json"
step paper_scale 120 "${tests[@]}" benchmarks/bench_paper_scale.py --device cuda \
  --benchmark-json "$out/paper_scale.json"
step tests 150 "${tests[@]}" -k cuda python_tests/ops python_tests/laplace python_tests/nn python_tests/test_models.py
if [[ $capability == 9.0 ]]; then
  step benchmarks_9.0a 60 env PYTHONPATH="$work/site_9.0a" "${tests[@]}" benchmarks/bench_kron_accumulate.py \
    benchmarks/bench_factors.py -k "not compile" --device cuda --benchmark-json "$out/benchmarks_9.0a.json"
fi
step racecheck 60 "${sanitizer[@]}" "${ours[@]}" --tool racecheck "${kernels[@]}"
# Of all kernels, for what torch's have written ours may read; and of fresh memory.
step initcheck 100 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${sanitizer[@]}" --tool initcheck "${kernels[@]}"
step compiled 180 "${tests[@]}" "${files[@]}" -k "compile or ella_cuda" --device cuda \
  --benchmark-json "$out/compiled.json"
step others 180 "${tests[@]}" benchmarks/bench_eigenvalues.py benchmarks/bench_basis_project.py --device cuda \
  --benchmark-json "$out/others.json"
if [[ $capability == 9.0 ]]; then
  step memcheck_9.0a 100 env PYTHONPATH="$work/site_9.0a" PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    "${sanitizer[@]}" "${ours[@]}" --tool memcheck "${kernels[@]}"
  step racecheck_9.0a 60 env PYTHONPATH="$work/site_9.0a" "${sanitizer[@]}" "${ours[@]}" --tool racecheck "${kernels[@]}"
fi
step growth 120 "${tests[@]}" benchmarks/bench_growth.py --device cuda --benchmark-json "$out/growth.json"
step dense_structure 180 "${tests[@]}" benchmarks/bench_dense_structure.py --device cuda \
  --benchmark-json "$out/dense_structure.json"
for report in benchmarks compiled benchmarks_9.0a paper_scale others growth dense_structure; do
  if [[ -s $out/$report.json ]]; then python -m benchmarks.compare "$out/$report.json" | tee -a "$out/table.txt"; fi
done
if [[ -n ${ARCHIVE:-} ]]; then tar czf "$ARCHIVE" -C "$out" .; fi
echo "in $out"
exit "$failed"
