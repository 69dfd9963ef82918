#!/bin/sh
# Runs a rank of an MPI job as on a host of its own: the directory COMMON is the mount of that host there.
#
# usage: on_host.sh COMMON MOUNT... -- PROGRAM ARG...
# Rank k has the mount k, and where there are more ranks than mounts the first ones again.
set -eu
common=$1
shift
hosts=0
for word; do
    [ "$word" = -- ] && break
    hosts=$((hosts + 1))
done
at=$((OMPI_COMM_WORLD_RANK % hosts))
mount=
while [ "$1" != -- ]; do
    [ "$at" -eq 0 ] && mount=$1
    at=$((at - 1))
    shift
done
shift
exec unshare --mount -- sh -c 'mount --bind "$0" "$1" && shift && exec "$@"' "$mount" "$common" "$@"
