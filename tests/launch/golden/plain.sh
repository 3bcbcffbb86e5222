#!/bin/bash
# Run wikitext-gpt2 on 1 node; made by drawbar submit.
#SBATCH --job-name=wikitext-gpt2
#SBATCH --chdir=/home/me/project
#SBATCH --output=/home/me/project/runs/wikitext-gpt2/launch/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1

drawbar_job=$SLURM_JOB_ID
drawbar_run=/home/me/project/runs/wikitext-gpt2
drawbar_yaml='run:
  name: wikitext-gpt2
optim:
  lr: 0.0001
'

# The job uses the configuration as it was submitted. Each node writes it to a file, as nodes may have own disks. It
# reaches them in base64, which has no commas and quotes: every container passes it on unchanged.
drawbar_config="$drawbar_run/launch/config-$drawbar_job.yaml"
DRAWBAR_CONFIG=$(printf %s "$drawbar_yaml" | base64 --wrap=0)
export DRAWBAR_CONFIG
unset DRAWBAR_SNAPSHOT

export DRAWBAR_JOB="$SLURM_JOB_ID" DRAWBAR_SIGNAL_SECONDS=120
# A file that says how the job ended, for when Slurm has forgotten the job; never half written.
drawbar_end="$drawbar_run/launch/ended-$drawbar_job.json"
# shellcheck disable=SC2317  # the trap calls it
ended() {
  printf '{"code": %d, "time": %d, "restarts": %d}\n' "$?" "$(date +%s)" "${SLURM_RESTART_COUNT:-0}" \
    > "$drawbar_end.tmp" && mv "$drawbar_end.tmp" "$drawbar_end"
}
mkdir -p "$drawbar_run/launch" || exit
rm -f "$drawbar_end"
trap ended EXIT
trap 'exit 143' TERM

# USR1 comes before the time limit, to this script alone: it goes on to the ranks, which save and end with 75.
# TERM comes from scancel or the scheduler, which tells the ranks itself, and decides whether the job goes on.
# INT comes from a terminal, and to srun as well.
told='' signals=0 early='' step=''
# shellcheck disable=SC2317  # the traps call it
note() {
  told=$1
  signals=$((signals + 1))
  if [ "$1" != USR1 ]; then return; fi
  if [ -n "$step" ]; then kill -s "$1" "$step"; else early=$1; fi
}
trap 'note USR1' USR1
trap 'note TERM' TERM
trap 'note INT' INT

/opt/env/bin/python -m drawbar.jobs.node.restart "$drawbar_run" "$drawbar_job" || exit

# The first node of this job, as Slurm reaches it; it chooses the address and a free port.
DRAWBAR_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export DRAWBAR_NODES
head=${DRAWBAR_NODES%%$'\n'*}
address=$(scontrol show node "$head" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')
endpoint=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  /opt/env/bin/python -m drawbar.jobs.node.first_node "${address:-$head}" "$SLURM_JOB_ID") || exit

if [ "$told" = TERM ] || [ "$told" = INT ]; then exit 143; fi
srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 \
  --kill-on-bad-exit=0 --wait=60 \
  /opt/env/bin/python -m drawbar.jobs.node.each_node "$endpoint" "$drawbar_config" \
  /opt/env/bin/python -m drawbar train "$drawbar_config" launch.nproc=1 &
step=$!
if [ -n "$early" ]; then kill -s "$early" "$step"; fi

# `wait` also ends when a signal comes: the exit code is that of a wait during which none came.
seen=-1
while [ "$signals" != "$seen" ]; do
  seen=$signals
  wait "$step"
  code=$?
done

# 75: the run has saved. 138: USR1 came before a rank could save, which costs nothing but time.
case "$told:$code" in
  :75 | USR1:75 | USR1:138)
    echo "drawbar: job $drawbar_job was interrupted (exit code $code) and goes back into the queue"
    scontrol requeue "$drawbar_job" && trap - EXIT
    ;;
esac
exit "$code"
