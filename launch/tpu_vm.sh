#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU VM slice, at the commit that is checked out here:
#   launch/tpu_vm.sh [--dry-run] NAME ZONE EXPERIMENT RUN_DIR [overrides…]
#   launch/tpu_vm.sh my-v5e-16 us-west4-a lrkv_1b2_lrkv /mnt/runs/a --mesh.data 16 --train.grad-accum 1
# RUN_DIR must be storage that all hosts see at the same path, such as a bucket mounted there or NFS.
# Each host gets the commit from this checkout's origin (so push it first) into ~/vhajax and makes its
# environment, which includes the TPU's libraries. `vhajax train` finds the other hosts by itself.
# Starts again after a crash, a lost host or a preemption, up to MAX_RESTARTS (default 20) times.
# Ctrl-C sends SIGTERM to every host's process, which saves; a second one waits no longer.
# Exit status: that of the first host whose own is not 0; 130 after Ctrl-C, 75 after SIGTERM.
# --dry-run prints the command instead of running it.
set -euo pipefail

fail() {
  echo "tpu_vm.sh: $1" >&2
  exit 2
}

# What `bash -c` runs on each host, with URL COMMIT and what `vhajax train` gets. The process of a
# connection that was lost still holds the TPU, so it is asked to save, and then killed, before the
# next starts.
# shellcheck disable=SC2016 # expanded on the host
on_host='
set -euo pipefail
fail() { echo "tpu_vm.sh on $(hostname): $1" >&2; exit 2; }
url=$1 commit=$2
shift 2
pid_file=$HOME/.vhajax-train.pid # of whoever came last, perhaps long gone
lives() { [ -s "$pid_file" ] && grep -qs vhajax "/proc/$(cat "$pid_file")/cmdline"; }
if lives; then
  kill -TERM "$(cat "$pid_file")" || true
  for _ in {1..120}; do lives || break; sleep 1; done
  if lives; then kill -KILL "$(cat "$pid_file")" || true; fi
fi
echo "$$" >"$pid_file"
[ -d "$HOME/vhajax" ] || git clone -q "$url" "$HOME/vhajax" || fail "$url cannot be cloned."
cd "$HOME/vhajax"
git cat-file -e "$commit^{commit}" 2>/dev/null || git fetch -q origin || fail "origin cannot be fetched."
git checkout -q --detach "$commit" || fail "commit $commit is not at $url, or ~/vhajax was changed."
launch/make_env.sh || fail "the environment could not be made."
.venv/bin/vhajax train "$@" </dev/null &
echo "$!" >"$pid_file"
wait "$!"
'
# shellcheck disable=SC2016
stop_on_host='pid=$(cat "$HOME/.vhajax-train.pid") && grep -qs vhajax "/proc/$pid/cmdline" && kill -TERM "$pid"'

on_all_hosts() { # COMMAND
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --quiet --command="$1" </dev/null
}

# A slice that was preempted is gone for good, and no restart brings it back.
check_slice() {
  local state
  state=$(gcloud compute tpus tpu-vm describe "$name" --zone="$zone" --format='value(state)') ||
    fail "there is no TPU VM $name in $zone that gcloud can see."
  [ "$state" = READY ] ||
    fail "the TPU VM $name is $state; once there is one that is READY, the same command goes on."
}

stop() { # STATUS-OF-THIS-SCRIPT
  [ -n "$job" ] || exit "$1"
  if [ -n "$stopped" ]; then
    kill -KILL -- "-$job" 2>/dev/null || true
    echo "tpu_vm.sh: not waiting for the hosts, which may go on; the same command stops them first." >&2
    exit "$stopped"
  fi
  stopped=$1
  echo "tpu_vm.sh: asking every host to save and stop." >&2
  on_all_hosts "$stop_on_host" >/dev/null 2>&1 &
}

# gcloud runs in a process group of its own, which a terminal's Ctrl-C does not reach.
train() {
  local status
  set -m
  on_all_hosts "$command" &
  job=$!
  set +m
  while :; do
    status=0
    wait "$job" || status=$?
    kill -0 "$job" 2>/dev/null || break # else a signal's trap ended the wait
  done
  job=
  return "$status"
}

dry_run=
if [ "${1:-}" = --dry-run ]; then
  dry_run=yes
  shift
fi
[ $# -ge 4 ] || fail "usage: launch/tpu_vm.sh [--dry-run] NAME ZONE EXPERIMENT RUN_DIR [overrides…]."
[[ ${MAX_RESTARTS:-20} =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS is $MAX_RESTARTS; it must be a whole number."
name=$1 zone=$2 experiment=$3 run_dir=$4
shift 4
case $run_dir in
  /*) ;;
  *) fail "RUN_DIR is $run_dir; it must be an absolute path, of storage that all hosts see." ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
commit=$(git rev-parse HEAD) || fail "this is no git checkout, so the hosts cannot get its code."
url=$(git remote get-url origin) || fail "this checkout has no origin, so the hosts cannot get its code."
command=$(printf '%q ' bash -c "$on_host" on_host "$url" "$commit" "$experiment" --run-dir "$run_dir" "$@")

if [ -n "$dry_run" ]; then
  printf '%q ' gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --quiet --command="$command"
  echo
  exit
fi
command -v gcloud >/dev/null || fail "gcloud is not on PATH."
stopped=
job=
trap 'stop 130' INT
trap 'stop 75' TERM
for ((restart = 0; ; restart++)); do
  check_slice
  status=0
  train || status=$?
  [ -z "$stopped" ] || exit "$stopped"
  case $status in
    0 | 2 | 130) exit "$status" ;;
  esac
  if [ "$restart" -ge "${MAX_RESTARTS:-20}" ]; then
    echo "tpu_vm.sh: ended with status $status after $restart restarts, as many as MAX_RESTARTS allows." >&2
    exit "$status"
  fi
  echo "tpu_vm.sh: ended with status $status; restart $((restart + 1)) of ${MAX_RESTARTS:-20}." >&2
done
