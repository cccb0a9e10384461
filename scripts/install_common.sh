# What install.sh and install_rocm.sh share; sourced by them, with the repository root as the working folder.

python="${PYTHON:-python}"
command -v "$python" >/dev/null 2>&1 || python=python3

say() { printf '[install] %s\n' "$*"; }

fail() {
  printf '[install] error: %s\n' "$*" >&2
  exit 2
}

check_python() {
  command -v "$python" >/dev/null 2>&1 || fail "no Python found: install Python 3.11 or 3.12, or name one with PYTHON=/path/to/python."
  "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || fail \
    "Python $("$python" -c 'import platform; print(platform.python_version())') is not supported: forge needs 3.11 or 3.12" \
    "(vLLM and Monarch have no builds for others). Make an environment with one: python3.11 -m venv .venv && source .venv/bin/activate"
  "$python" -m pip --version >/dev/null 2>&1 || fail "'$python' has no pip: run '$python -m ensurepip', or make an environment with python3.11 -m venv .venv"
  [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || "$python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' ||
    say "note: no environment is active, so this installs into the system's Python. 'python3.11 -m venv .venv' makes one."
  command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || say "note: no C compiler found; torch.compile and some vLLM kernels need one."
}

check_platform() {
  case "$(uname -s)-$(uname -m)" in
    Linux-x86_64) ;;
    *) fail "no stack for $(uname -s) on $(uname -m): the locked versions are for Linux on x86-64." ;;
  esac
}

# Twice quiet: errors only.
pip_install() { "$python" -m pip install --quiet --quiet --disable-pip-version-check --no-deps "$@"; }

# installed PACKAGE: its version, or nothing.
installed() {
  "$python" -c 'import sys
from importlib.metadata import PackageNotFoundError, version
try: print(version(sys.argv[1]))
except PackageNotFoundError: pass' "$1"
}

remove_if_installed() {
  if [ -n "$(installed "$1")" ]; then
    say "removing $1, which does not go with this stack"
    "$python" -m pip uninstall --quiet --yes "$1"
  fi
}

# pinned PACKAGE LOCK: the line of requirements/LOCK.txt that pins it.
pinned() { grep -m1 -E "^$1==" "requirements/$2.txt"; }

# install_torch REQUIREMENT INDEX: pip's own configuration first, PyTorch's index for this build if that does not have it.
install_torch() {
  if [ "torch==$(installed torch)" = "$1" ]; then return; fi
  local log
  log="$(mktemp)"
  say "$1"
  if ! pip_install "$1" >"$log" 2>&1; then
    say "the configured package index has no $1: taking it from $2"
    if ! pip_install --index-url "$2" "$1"; then
      cat "$log" >&2
      rm -f "$log"
      fail "$1 could not be installed, neither from the configured index (its answer is above) nor from $2."
    fi
  fi
  rm -f "$log"
}

install_lock() {
  say "requirements/$1.txt: $(grep -c '==' "requirements/$1.txt") packages, a few minutes the first time"
  pip_install -r "requirements/$1.txt" || fail "requirements/$1.txt could not be installed; pip's message is above. Running the same command again continues."
}

install_forge() { pip_install --no-build-isolation --editable . || fail "forge itself could not be installed; pip's message is above."; }

final_check() { "$python" -c "import torch, forge, vllm; print('OK')"; }
