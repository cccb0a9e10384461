#!/usr/bin/env bash
# Supervised fine-tuning on the nodes of a SLURM job. Submit it from the repository's folder, which every node must see under the same path:
#
#   sbatch --nodes=2 --gpus-per-node=8 run_sft.sh --config apps/sft/llama3_8b.yaml [--key.path value ...]
#
# Partition, account, time and everything else are sbatch's own options, or its variables (SBATCH_PARTITION,
# SBATCH_ACCOUNT, SBATCH_TIMELIMIT); FORGE_SRUN_ARGS goes to the srun that starts the workers. PYTHON names the
# interpreter; .venv/bin/python is taken if it is there. See docs/scale.md.
#SBATCH --job-name=forge-sft
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:TERM@120
set -euo pipefail
source "${SLURM_SUBMIT_DIR:-.}/scripts/slurm_job.sh"
start apps.sft.main apps/sft/llama3_8b.yaml "$@"
