#!/bin/bash
# Run wikitext-gpt2 on 2 nodes; made by drawbar submit.
#SBATCH --job-name=wikitext-gpt2
#SBATCH --chdir=/home/me/project
#SBATCH --output=/scratch/runs/wikitext-gpt2/launch/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8

export PYTHONNOUSERSITE=1
runtime=singularity
if ! command -v "$runtime" > /dev/null; then
  echo 'error: there is no singularity on the node' >&2
  echo '  fix:   load it by cluster.modules or cluster.setup, or name another in cluster.container' >&2
  exit 1
fi
container=(
  "$runtime" exec
  --nv
  --bind=/home/me/project:/home/me/project
  --bind=/scratch/runs:/scratch/runs
  --pwd=/home/me/project
  docker://me/drawbar:1
)

# USR1 comes before the time limit, to this script alone: it goes on to the ranks, which save and end with 75.
# TERM comes from scancel or the scheduler, which tells the ranks itself, and decides whether the job goes on.
told='' signals=0 early='' step=''
# shellcheck disable=SC2317  # the traps call it
note() {
  told=$1
  signals=$((signals + 1))
  if [ "$1" = TERM ]; then return; fi
  if [ -n "$step" ]; then kill -s "$1" "$step"; else early=$1; fi
}
trap 'note USR1' USR1
trap 'note TERM' TERM

"${container[@]}" python3 -m drawbar.launch.restarts /scratch/runs/wikitext-gpt2 "$SLURM_JOB_ID" || exit

# The first node of this job, as Slurm reaches it; it chooses the address and a free port.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$head" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')
meeting=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  "${container[@]}" python3 -m drawbar.launch.head "${address:-$head}" "$SLURM_JOB_ID") || exit

srun --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1 \
  --kill-on-bad-exit=0 --wait=60 \
  "${container[@]}" python3 -m drawbar.launch.node "$meeting" \
  python3 -m drawbar train config.yaml launch.nproc=8 &
step=$!
if [ -n "$early" ]; then kill -s "$early" "$step"; fi

# `wait` also ends when a signal comes: the exit code is that of a wait during which none came.
seen=-1
while [ "$signals" != "$seen" ]; do
  seen=$signals
  wait "$step"
  code=$?
done

# USR1 before a rank could save: nothing is lost but time.
case "$told:$code" in
  :75 | USR1:75 | USR1:138)
    echo "drawbar: job $SLURM_JOB_ID was interrupted (exit code $code) and goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
esac
exit "$code"
