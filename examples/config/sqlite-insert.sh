#!/bin/sh
# sqlite-insert.sh DIR [ROWS]: one sqlite3 process inserts numbered rows, each in a transaction of
# its own. At any instant the table is a prefix: row n holds n and a value computed from n.
set -eu
db=$1/rows.db
rows=${2:-2000}
{
    echo "PRAGMA journal_mode=DELETE;"
    echo "CREATE TABLE IF NOT EXISTS rows (n INTEGER PRIMARY KEY, value TEXT);"
    seq "$rows" | awk '{ printf "INSERT INTO rows VALUES (%d, hex(%d * 7919));\n", $1, $1 }'
} | sqlite3 -bail "$db" >/dev/null
