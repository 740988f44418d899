#!/usr/bin/env bash
# tools/netlab: a shaped network comes up, carries MPI ranks at the speed it was given, and leaves nothing behind.
# Exit code 77: skipped.
set -uo pipefail
netlab=$1 program=$2
scratch=$(mktemp -d)
export NETLAB_NAME=ggtest$$ NETLAB_NET=10.$((64 + $$ % 128)).$(($$ / 128 % 256))
says() { local text=$1; shift; grep -q -- "$text" <<<"$("$@" 2>&1)"; }  # the command is meant to fail
fail() { echo "FAILED: $*"; exit 1; }

says "accepted: 2 to 16" "$netlab" up 1 1gbit || fail "1 namespace was not refused"
says "is not a rate" "$netlab" up 2 fast || fail "the rate 'fast' was not refused"
if [ "$(id -u)" != 0 ]; then
  says "needs root" "$netlab" up 2 1gbit || fail "no root, and not said so"
  rm -rf "$scratch"; echo "skipped: needs root for network namespaces"; exit 77
fi
trap '"$netlab" down; rm -rf "$scratch"' EXIT
if ! "$netlab" up 2 100mbit >"$scratch/up" 2>&1; then
  cat "$scratch/up"; echo "skipped: network namespaces or traffic shaping cannot be had here"; exit 77
fi
says "is up already" "$netlab" up 2 100mbit || fail "a second one of the name was not refused"
[ "$("$netlab" status | wc -l)" = 2 ] || fail "status"

out=$("$netlab" run --torch sh -c 'echo "rank $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT"' | sort)
[ "$out" = "rank 0 of 2 at $NETLAB_NET.1:29400
rank 1 of 2 at $NETLAB_NET.1:29400" ] || fail "--torch: $out"
"$netlab" run --torch sh -c '[ "$RANK" = 1 ] && exit 3; sleep 60'
[ $? = 3 ] || fail "--torch: the exit code of the rank that failed"

# The rate is found again: beta of each collective's fit within 10 % of 12.5 MB/s, headers of TCP and Ethernet included.
# A busy machine can only make it slower: it counts when one of five tries finds it.
for _ in 1 2 3 4 5; do
  "$netlab" run "$program" calibrate -c none -b 256K -e 2M -n 3 -w 1 -o "$scratch/p.json" >"$scratch/out" 2>&1 ||
    { cat "$scratch/out"; continue; }
  python3 - "$scratch/p.json" >>"$scratch/found" <<'PYTHON'
import json, sys
for name, fitted in json.load(open(sys.argv[1]))["collectives"].items():
    beta = (fitted["pieces"] or [fitted])[-1]["beta_bytes_per_s"]
    print(name, beta, "good" if abs(beta / 12.5e6 - 1) < 0.1 else "bad")
PYTHON
  if [ "$(grep good "$scratch/found" | awk '{print $1}' | sort -u | wc -l)" = 3 ]; then
    "$netlab" down
    [ -z "$(ip netns list | grep "^$NETLAB_NAME-")" ] || fail "namespaces are left"
    exit 0
  fi
done
cat "$scratch/found"
fail "no fit within 10 % of the shaped rate in five tries"
