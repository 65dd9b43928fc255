#!/usr/bin/env bash
#SBATCH --job-name=pretrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=pretrain-%j.log
#
# Pre-training on one node or many of a Slurm cluster. From the root of the repository, with the project's environment
# active, on a file system that all nodes share:
#
#   sbatch --nodes=4 examples/slurm/pretrain.sh --config examples/configs/tiny.yaml --data-path CORPUS \
#          --tokenizer-model DIR --save runs/first --load runs/first
#
# Five minutes before its time is over, or when Slurm asks it to stop, the run saves and ends with exit code 75; the job
# is then queued again and resumes, which is why it needs both --save and --load. Any other exit code ends the job; so
# does a file STOP in the folder given to --save, after a checkpoint. What sbatch is given on its command line replaces
# the lines above; a cluster with its own way of asking for GPUs needs that.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]} MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # two jobs may share a node

# One task per node, which starts the node's ranks. When one task has ended, Slurm does not kill the others at once: they
# may be saving (--kill-on-bad-exit=0). It ends them after --wait seconds, which is longer than
# --distributed-timeout-minutes, so that the run can name the rank that it waits for.
step=(srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=720)
if [[ -n ${SLURM_CPUS_PER_TASK-} ]]; then step+=("--cpus-per-task=$SLURM_CPUS_PER_TASK"); fi

"${step[@]}" bash examples/pretrain_neobert.sh "$@" &
child=$!
# USR1 in either case: srun answers TERM by killing its tasks.
trap 'signalled=1; kill -USR1 "$child" 2>/dev/null || true' USR1 TERM
while
    signalled=0 code=0
    wait "$child" || code=$?
    ((signalled)) # the signal has ended the wait, not srun
do :; done
save='' previous=''
for word in "$@"; do
    if [[ $previous == --save ]]; then save=$word; fi
    if [[ $word == --save=* ]]; then save=${word#--save=}; fi
    previous=$word
done
if [[ $code == 75 && -n $save && -e $save/STOP ]]; then
    echo "$save/STOP exists: the job is not queued again" >&2
elif [[ $code == 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
