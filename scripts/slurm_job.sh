# What run_grpo.sh and run_sft.sh share; sourced by them inside a SLURM job:  start MODULE DEFAULT_CONFIG ARGUMENTS...

start() {
  local module="$1" config="$2" python="${PYTHON:-}"
  shift 2
  cd "${SLURM_SUBMIT_DIR:-$PWD}"
  [ -n "$python" ] || { [ -x .venv/bin/python ] && python="$PWD/.venv/bin/python" || python=python; }
  case " $* " in *" --config"[\ =]*) ;; *) set -- --config "$config" "$@" ;; esac
  export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
  # exec, so that the signals that SLURM sends to the batch script alone reach the program, which then writes a checkpoint.
  exec "$python" -m "$module" --launcher slurm "$@"
}
