#!/bin/bash
# A Slurm of its own: a controller and some hosts, each with a name, mounts, processes and a /dev/shm of its own.
#
# usage: slurm_cluster.sh DIR PROGRAMS CGROUP HIERARCHY TIMEOUT HOST...
# It must be the first process of new mount, network, UTS, IPC and process namespaces: no port, socket or name is then one of
# the machine's, and all ends with it. DIR has the configuration and logs; DIR/bin shows PROGRAMS, and DIR/scratch is for users.
# DIR/site has prolog, epilog and task-prolog. Cgroups of a host lie in HIERARCHY/CGROUP-HOST: the freezer of cgroup v1, or a
# cgroup v2, of which a host sees that part as the whole. A host is down when its slurmd has not answered for TIMEOUT seconds. A
# host whose processes are killed comes back when DIR/up.HOST is made.
set -eu
dir=$1 programs=$2 cgroup=$3 hierarchy=$4 timeout=$5
shift 5
mkdir "$dir"/{state,log,scratch,bin,munge}
chmod 1777 "$dir/scratch"
mount --make-rprivate /
# Mounts of other tests, which these namespaces would keep.
awk '$3 == "fuse.firn" { print $2 }' /proc/mounts | xargs -r umount --lazy || :
mount --bind "$programs" "$dir/bin"
# The controller syncs its state, and answers nobody meanwhile.
mount -t tmpfs firn-test "$dir/state"
hostname controller
# An address that is not loopback's, or names are not looked up (AI_ADDRCONFIG), and Open MPI finds no network.
ip link set lo up
ip link add firn0 type veth peer name firn1
ip address add 10.99.0.1/24 dev firn0
ip link set firn0 up
ip link set firn1 up
printf '127.0.0.1 localhost\n10.99.0.1 controller %s\n' "$*" > "$dir/hosts"
mount --bind "$dir/hosts" /etc/hosts

head -c 128 /dev/urandom > "$dir/munge.key"
chmod 600 "$dir/munge.key"
munged --force --socket="$dir/munge/socket" --key-file="$dir/munge.key" --log-file="$dir/log/munged" \
    --pid-file="$dir/munged.pid" --seed-file="$dir/munged.seed"

version=v1
[[ $(stat -f -c %T "$hierarchy") != cgroup2fs ]] || version=v2
cat > "$dir/slurm.conf" <<CONF
ClusterName=firn
SlurmctldHost=controller(10.99.0.1)
SlurmctldPort=26817
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/slurmctld.pid
SlurmctldLogFile=$dir/log/slurmctld
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmdLogFile=$dir/log/slurmd.%n
SlurmdSpoolDir=$dir/spool.%n
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=$timeout
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PrologFlags=Alloc
Prolog=$dir/site/prolog
TaskProlog=$dir/site/task-prolog
Epilog=$dir/site/epilog
KillWait=60
MessageTimeout=60
CONF
port=26818
for host; do
    echo "NodeName=$host NodeAddr=10.99.0.1 NodeHostname=$host Port=$port CPUs=8 RealMemory=4000 State=UNKNOWN" >> "$dir/slurm.conf"
    port=$((port + 1))
done
hosts=$*
echo "PartitionName=all Nodes=${hosts// /,} Default=YES State=UP" >> "$dir/slurm.conf"
printf '%s\n' CgroupPlugin=cgroup/$version CgroupAutomount=no ConstrainCores=no ConstrainRAMSpace=no > "$dir/cgroup.conf"
# No systemd is asked for a scope.
[[ $version == v1 ]] || echo IgnoreSystemd=yes >> "$dir/cgroup.conf"
export SLURM_CONF=$dir/slurm.conf
slurmctld

# What Slurm's own processes are started by: nothing, or a library without which Slurm refuses a machine that has v1 beside v2.
show=()
if [[ $version == v2 ]] && grep -qv ^0: /proc/self/cgroup; then
    cc -O1 -shared -fPIC -o "$dir/without_v1.so" "$(dirname "$0")/without_v1.c"
    show=(env "LD_PRELOAD=$dir/without_v1.so")
fi
printf '#!/bin/sh\nexec %s /usr/sbin/slurmstepd "$@"\n' "${show[*]}" > "$dir/slurmstepd"
chmod 755 "$dir/slurmstepd"

run_host() {
    local host=$1 own=$hierarchy/$cgroup-$1 cgroup_space=()
    mkdir "$dir/spool.$host" "$own"
    if [[ $version == v2 ]]; then
        # The root of its cgroup namespace.
        echo 0 > "$own/cgroup.procs"
        cgroup_space=(--cgroup)
    fi
    # shellcheck disable=SC2016
    exec unshare --mount --uts --ipc --pid "${cgroup_space[@]}" --fork --kill-child --mount-proc --propagation private bash -c '
        host=$1 dir=$2 own=$3 hierarchy=$4 version=$5
        shift 5
        hostname "$host"
        mount -t tmpfs -o mode=1777 firn-test /dev/shm
        if [[ $version == v1 ]]; then
            mount --bind "$own" "$hierarchy"
        else
            umount --recursive --lazy /sys/fs/cgroup
            mount -t cgroup2 firn-test /sys/fs/cgroup
            # As systemd has it.
            mkdir -p /sys/fs/cgroup/system.slice
        fi
        while :; do
            "$@" slurmd -D -N "$host" -d "$dir/slurmstepd" || :
            until [[ -e $dir/up.$host ]]; do sleep 0.1; done
            rm "$dir/up.$host"
        done' _ "$host" "$dir" "$own" "$hierarchy" "$version" "${show[@]}" > "$dir/log/$host" 2>&1
}
for host; do
    run_host "$host" &
done
wait
