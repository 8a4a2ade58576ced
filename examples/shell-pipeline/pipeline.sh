#!/bin/sh
# pipeline.sh OUTFILE [ROUNDS [LINES]]: in each round a pipeline of children makes, mixes, sorts and
# digests numbers; one line per round is appended to OUTFILE. Its content depends on ROUNDS and
# LINES only. PAUSE (seconds, default 0.02) stretches the rounds.
set -eu
out=$1
rounds=${2:-200}
lines=${3:-2000}
pause=${PAUSE:-0.02}

: >"$out"
round=1
while [ "$round" -le "$rounds" ]; do
    sum=$(
        seq "$lines" |
            awk -v round="$round" '{ print ($1 * 7919 + round * 104729) % 1000003 }' |
            sort -n |
            { sleep "$pause"; cat; } |
            sha256sum
    )
    # The subshell and the variables of this loop are what has to survive.
    echo "round $round ${sum%% *}" >>"$out"
    round=$((round + 1))
done
echo "done $rounds" >>"$out"
