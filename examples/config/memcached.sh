#!/bin/sh
# Four worker threads, 256 MB, all interfaces.
exec memcached -t 4 -m 256 -u root -l 0.0.0.0 -p "${1:-11211}"
