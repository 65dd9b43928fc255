#!/usr/bin/env bash
#SBATCH --job-name=preprocess
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-cpu=1G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --output=preprocess-%A_%a.log
#
# Preprocessing on many nodes of a Slurm cluster: an array whose tasks share the parts of the shards among themselves,
# and one job that joins what they have left in PREFIX.partial. From the root of the repository, with the project's
# environment active, on a file system that all nodes share:
#
#   arguments=(--input '/data/refinedweb/*.parquet' --output-prefix /data/corpus/web --tokenizer-model vocab.txt)
#   array=$(sbatch --parsable --array=0-63 examples/slurm/preprocess.sh "${arguments[@]}")
#   sbatch --dependency=afterok:"$array" examples/slurm/preprocess.sh "${arguments[@]}"
#
# A task that is preempted, or runs out of time, is queued again and resumes at its chunk. Tasks that
# failed can be started again alone: NUM_SHARDS=64 sbatch --array=5,17 examples/slurm/preprocess.sh "${arguments[@]}".
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

command=(python -m megatron_neobert preprocess "$@" --resume --workers "${SLURM_CPUS_PER_TASK:-1}")
if [[ -n ${SLURM_ARRAY_TASK_ID-} ]]; then
    command+=(--shard-index "$SLURM_ARRAY_TASK_ID" --num-shards "${NUM_SHARDS:-$SLURM_ARRAY_TASK_COUNT}")
else
    command+=(--merge)
fi

"${command[@]}" &
child=$!
trap 'kill -TERM "$child"' TERM
code=0
wait "$child" || code=$?
trap - TERM
if kill -0 "$child" 2>/dev/null; then # the signal has ended the first wait
    code=0
    wait "$child" || code=$?
fi
if [[ $code == 75 && -n ${SLURM_JOB_ID-} ]]; then # stopped early, its finished parts are kept
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
