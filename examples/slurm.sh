#!/bin/bash
#SBATCH --job-name=shardckpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4      # one process for each of the Trainer's devices
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300        # to all processes that srun started, 300 s before the time is up
#SBATCH --requeue                # after a preemption or a lost node, the job starts anew, too
#SBATCH --open-mode=append       # with all of it in one log
#SBATCH --output=%x-%j.log

# Train on two nodes, until it is done, however often the job is interrupted:
#
#     sbatch examples/slurm.sh [ARGUMENTS OF train.py …]
#
# At SIGTERM all ranks stop after the same step and save; train.py ends with status 75, and the job is put into the queue
# again. It goes on from the newest complete checkpoint, as configs/slurm.yaml says. A job that fails is not requeued.

set -u
cd "${SLURM_SUBMIT_DIR:-.}"

# The first process that ends must not take the others with it while they still save.
srun --kill-on-bad-exit=0 python examples/train.py fit \
    --config configs/transformer.yaml --config configs/slurm.yaml "$@"
status=$?

case $status in
    75 | 143) scontrol requeue "$SLURM_JOB_ID" ;;  # 143: the signal came before training began
    *) exit $status ;;
esac
