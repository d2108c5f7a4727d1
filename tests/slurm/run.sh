#!/bin/bash
# run.sh - jobs/slurm.sh on a real Slurm: an array of 4 shards, disturbed, merged, and compared with a
# job that nobody disturbed.
#
# Starts munged, slurmctld and slurmd of Debian's slurm-wlm on this machine alone, with a configuration
# in a temporary folder, and ends them whatever happens. Needs root, and installs slurm-wlm and munge
# if they are missing (INSTALL=0: says so and fails). BUILD names the build folder.
#
#   shard 1   SIGTERM to the batch script, as Slurm sends it before the time limit
#   shard 2   batchgen killed (SIGKILL) under the script
#   shard 3   scontrol requeue from outside
#   shard 4   nothing
set -u -o pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "$root" && realpath "${BUILD:-build}")
host=$(hostname -s)
dir=$(mktemp -d /tmp/batchgen-slurm.XXXXXX)
jobs=()

say() { echo "slurm: $*"; }

# Waits until pid $1 is gone; $2 seconds at most.
gone() {
    for ((i = 0; i < $2 * 10; i++)); do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.1
    done
    return 1
}

end_daemon() {
    local pid
    pid=$(cat "$dir/$1.pid" 2>/dev/null) || return 0
    kill "$pid" 2>/dev/null
    gone "$pid" 15 || kill -9 "$pid" 2>/dev/null
}

clean_up() {
    trap - EXIT INT TERM
    if [ "${#jobs[@]}" -gt 0 ]; then
        scancel --full "${jobs[@]}" 2>/dev/null
        for ((i = 0; i < 100; i++)); do # their slurmstepds must end before slurmd
            [ -z "$(squeue -h -t running,completing 2>/dev/null)" ] && break
            sleep 0.1
        done
    fi
    end_daemon slurmd
    end_daemon slurmctld
    end_daemon munged
    if [ "${KEEP:-0}" = 1 ]; then say "kept $dir"; else rm -rf "$dir"; fi
}

fail() {
    say "FAILED: $*"
    squeue -a 2>/dev/null
    tail -n 20 "$dir"/*.log "$dir"/work/*.log 2>/dev/null
    clean_up
    exit 1
}

trap clean_up EXIT
trap 'fail interrupted' INT TERM

# ---- what must be there --------------------------------------------------------------------------

[ "$(id -u)" = 0 ] || fail "needs root: slurmd runs jobs as their users"
for program in batchgen mkmodel; do
    [ -x "$build/$program" ] || fail "no $build/$program: make first"
done
PATH=$PATH:/usr/sbin
for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null && continue
    [ "${INSTALL:-1}" = 1 ] || fail "no $program; apt-get install slurm-wlm munge"
    say "installing slurm-wlm and munge"
    apt-get update -qq >"$dir/apt.log" 2>&1
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge \
        >>"$dir/apt.log" 2>&1 || fail "apt-get"
done

# ---- one machine's Slurm -------------------------------------------------------------------------

chmod 755 "$dir" # munged refuses a socket in a private folder
mkdir "$dir/state" "$dir/spool" "$dir/work"
base=$((20000 + RANDOM % 20000))
export SLURM_CONF=$dir/slurm.conf
cat >"$SLURM_CONF" <<EOF
ClusterName=batchgen
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$base
SlurmdPort=$((base + 1))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.sock
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
MinJobAge=86400
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
EOF

dd if=/dev/urandom of="$dir/munge.key" bs=128 count=1 status=none
chmod 600 "$dir/munge.key"
munged --force --key-file="$dir/munge.key" --socket="$dir/munge.sock" --pid-file="$dir/munged.pid" \
    --log-file="$dir/munged.log" --seed-file="$dir/munge.seed" || fail munged
slurmctld -c || fail slurmctld
slurmd || fail slurmd

for ((i = 0; ; i++)); do
    [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && break
    [ "$i" -lt 300 ] || fail "the node does not come up: $(sinfo -h -o '%T %E' 2>&1)"
    sleep 0.2
done
say "$(slurmd -V) runs on $host"

# ---- the job -------------------------------------------------------------------------------------

cd "$dir/work" || fail "no folder"
"$build/mkmodel" --preset tiny-llama --mix q4_k_m -o model.gguf >/dev/null || fail mkmodel
for ((i = 1; i <= ${RECORDS:-800}; i++)); do
    [ $((i % 97)) = 0 ] && echo '{"prompt": broken'
    echo "{\"id\": \"r$i\", \"prompt\": \"light of morning $i\", \"temperature\": 0.8, \"max_tokens\": $((40 + i % 80)), \"ignore_eos\": true}"
done >prompts.jsonl
cat >job.json <<'EOF'
{"input": ["prompts.jsonl"], "model": "model.gguf", "threads": 1, "max_num_seqs": 2, "commit_bytes": 1,
 "commit_interval": 0.01}
EOF
mkdir bin
ln -s "$build/batchgen" bin/batchgen
export PATH=$PWD/bin:$PATH
# The environment of this test is the user's, not one with settings of somebody's own.
for name in $(compgen -e BATCHGEN_); do unset "$name"; done

batchgen run --job job.json -o whole.jsonl --commit-bytes 512KiB --commit-interval 5 --max-num-seqs 16 -q 2>whole.log
[ $? = 1 ] || fail "the undisturbed run" # 1: there are bad lines

array=$(sbatch --parsable --cpus-per-task=1 --mem=100M "$root/jobs/slurm.sh") || fail sbatch
jobs+=("$array")
merge=$(sbatch --parsable --dependency="afterok:$array" "$root/jobs/slurm-merge.sh") || fail sbatch
jobs+=("$merge")
say "array $array, merge $merge"

journal() { echo "answers-$1of4.jsonl.lz4.journal"; }
commits() { grep -c '^{"commit"' "$(journal "$1")" 2>/dev/null || true; }
field() { scontrol show job "$1" | tr ' ' '\n' | sed -n "s/^$2=//p" | head -1; }

# Until shard $1 has $2 commits and still runs.
half_way() {
    for ((i = 0; i < 1200; i++)); do
        [ "$(commits "$1")" -ge "$2" ] 2>/dev/null && [ "$(field "${array}_$1" JobState)" = RUNNING ] && return
        sleep 0.05
    done
    fail "shard $1 was not seen half-way"
}

half_way 1 3
scancel --batch --signal=TERM "${array}_1" || fail scancel
say "shard 1: SIGTERM to its script"

half_way 2 3
pid=$(grep -o '"pid":[0-9]*' "$(journal 2)" | tail -1 | tr -dc 0-9)
kill -9 "$pid" || fail "shard 2: no process $pid"
say "shard 2: batchgen $pid killed"

half_way 3 3
scontrol requeue "${array}_3" || fail "scontrol requeue"
say "shard 3: requeued from outside"

# What waits in the queue again may start at once; Slurm would let it wait for two minutes.
for ((i = 0; ; i++)); do
    waiting=$(squeue -h -j "$array,$merge" -r -o '%A %T %r' 2>/dev/null)
    [ -z "$waiting" ] && break
    echo "$waiting" | while read -r id state why; do
        [ "$state $why" = "PENDING BeginTime" ] && scontrol update JobId="$id" StartTime=now
    done
    case $waiting in *DependencyNeverSatisfied*) fail "a shard failed for good" ;; esac
    [ "$i" -lt 1200 ] || fail "not done in ten minutes"
    sleep 0.5
done

# ---- what came of it -----------------------------------------------------------------------------

for i in 1 2 3 4; do
    state=$(field "${array}_$i" JobState) restarts=$(field "${array}_$i" Restarts)
    say "shard $i: $state, restarts: $restarts"
    [ "$state" = COMPLETED ] || fail "shard $i is $state"
    want=$([ "$i" = 4 ] && echo 0 || echo 1)
    [ "$restarts" = "$want" ] || fail "shard $i: $restarts restarts, not $want"
    resumed=$(grep -c 'going on after [1-9]' "batchgen-${array}_$i.log")
    [ "$resumed" = "$want" ] || fail "shard $i went on $resumed times, not $want"
done
[ "$(field "$merge" JobState)" = COMPLETED ] || fail "the merge is $(field "$merge" JobState)"
lines=$(wc -l <prompts.jsonl)
lz4 -dc answers.jsonl.lz4 >merged.jsonl || fail "lz4 cannot read the merged output"
[ "$(wc -l <merged.jsonl)" = "$lines" ] || fail "$(wc -l <merged.jsonl) results of $lines lines"
# The same results, and the merged ones in the order of the input.
sort -t: -k2n whole.jsonl >want.jsonl
cmp want.jsonl merged.jsonl || fail "the merged output differs from that of an undisturbed job"
say "OK: $lines results of 4 shards, 3 of them disturbed, are those of an undisturbed job"
