#!/bin/sh
# xz.sh INPUT OUTPUT: compresses with two threads; the output depends on the input only.
exec xz -T2 --block-size=1MiB -6 -c "$1" >"$2"
