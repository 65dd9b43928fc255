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
# Pre-train on one or more nodes of a Slurm cluster. Submit from the root of the repository, on a file system that all
# nodes share, with the environment of this project active:
#
#   sbatch --nodes=4 examples/slurm/pretrain.sh --config neobert_stage1 --data-path CORPUS \
#          --tokenizer-model DIR --save runs/stage1 --load runs/stage1
#
# Five minutes before the time limit, or when Slurm stops the job, the run saves a checkpoint and ends with exit code
# 75. The job is then requeued and resumes, so it needs --save and --load. The job is also requeued after a crash (a lost
# rank, a failed read or write, or a signal such as the one of the out-of-memory killer), until five crashes in a row
# have left no new checkpoint. Any other exit code ends the job. So does a file STOP in the folder of --save: the run
# saves a checkpoint, and the job is not requeued. Flags of sbatch on the command line override the #SBATCH lines of this
# file, for example on a cluster that requests GPUs in another way.
set -euo pipefail
if [[ ${1-} == -h || ${1-} == --help ]]; then
    sed -n '/^# Pre-train/,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    printf '\n' && sed -n 's/^#SBATCH/  &/p' "$0"
    exit 0
fi
if [[ -z ${SLURM_JOB_ID-} ]]; then echo "pretrain: not a Slurm job; start it with sbatch, see --help" >&2; exit 2; fi
cd "${SLURM_SUBMIT_DIR:-.}"

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]} MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # two jobs can share a node

# One task per node starts the ranks of the node. When a task has ended, Slurm must not kill the others at once, because
# they may be saving (--kill-on-bad-exit=0). It kills them after --wait seconds, which is longer than
# --distributed-timeout-minutes, so that the run can first report the rank that does not answer.
step=(srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=720)
if [[ -n ${SLURM_CPUS_PER_TASK-} ]]; then step+=("--cpus-per-task=$SLURM_CPUS_PER_TASK"); fi

"${step[@]}" bash examples/pretrain_neobert.sh "$@" &
child=$!
# Forward both signals as USR1, because srun kills its tasks on TERM.
trap 'signalled=1; kill -USR1 "$child" 2>/dev/null || true' USR1 TERM
while
    signalled=0 code=0
    wait "$child" || code=$?
    ((signalled)) # the signal ended `wait`, but srun is still running
do :; done
save='' previous=''
for word in "$@"; do
    if [[ $previous == --save ]]; then save=$word; fi
    if [[ $word == --save=* ]]; then save=${word#--save=}; fi
    previous=$word
done
requeue=0 reason='' advice=''
case $code in
75 | 138) requeue=1 ;; # 138: USR1 ended a task before it could handle signals
69 | 74 | 134 | 137 | 139) # docs/troubleshooting.md
    reason=', a crash without --save'
    if [[ -n $save && -d $save ]]; then
        # SAVE/crashes has the newest checkpoint and the number of crashes since it was written.
        newest=$(find "$save" -maxdepth 1 -name 'iter_*' -printf '%f\n' | sort | tail -n 1)
        newest=${newest:-none} checkpoint='' crashes=0
        if [[ -f $save/crashes ]]; then read -r checkpoint crashes <"$save/crashes" || true; fi
        if [[ $checkpoint != "$newest" ]]; then crashes=0; fi
        reason=", crash $((++crashes)) since the newest checkpoint ($newest)"
        if ((crashes >= 5)); then
            advice='; read the log, then submit the job again'
            rm -f "$save/crashes"
        elif echo "$newest $crashes" >"$save/crashes"; then # fails on a full disk
            requeue=1
        fi
    fi
    ;;
esac
if ((requeue)) && [[ -n $save && -e $save/STOP ]]; then requeue=0 reason+=", $save/STOP exists"; fi
if ((requeue)); then
    echo "pretrain: exit code $code$reason, requeued" >&2 # before scontrol, which may end this script
    scontrol requeue "$SLURM_JOB_ID"
else
    echo "pretrain: exit code $code$reason, not requeued$advice" >&2
fi
exit "$code"
