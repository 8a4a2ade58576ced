// Runs a core workload of YCSB against a Redis: the generators, the clients and the measurements
// are those of github.com/pingcap/go-ycsb, of which this takes the Redis binding only.
//
//	ycsb load|run NAME=VALUE...
//
// Properties are those of go-ycsb: recordcount, operationcount, readproportion, redis.addr, ….
// The last line is an object: seconds, and what each operation took.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/magiconair/properties"
	_ "github.com/pingcap/go-ycsb/db/redis"
	"github.com/pingcap/go-ycsb/pkg/client"
	"github.com/pingcap/go-ycsb/pkg/measurement"
	"github.com/pingcap/go-ycsb/pkg/prop"
	_ "github.com/pingcap/go-ycsb/pkg/workload"
	"github.com/pingcap/go-ycsb/pkg/ycsb"
)

func main() {
	if len(os.Args) < 2 || (os.Args[1] != "load" && os.Args[1] != "run") {
		fmt.Fprintln(os.Stderr, "usage: ycsb load|run NAME=VALUE...")
		os.Exit(2)
	}
	if err := work(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "ycsb:", err)
		os.Exit(1)
	}
}

func work(command string, words []string) error {
	all := properties.NewProperties()
	// Nothing is expanded in values.
	all.DisableExpansion = true
	for _, word := range words {
		name, value, _ := strings.Cut(word, "=")
		if _, _, err := all.Set(name, value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	// Everybody counts from the first operation on, and says so once, at the end.
	all.Set(prop.Command, command)
	all.Set(prop.DoTransactions, fmt.Sprint(command == "run"))
	all.Set(prop.LogInterval, "100000")
	measurement.InitMeasure(all)
	core, err := ycsb.GetWorkloadCreator("core").Create(all)
	if err != nil {
		return fmt.Errorf("make the workload: %w", err)
	}
	redis, err := ycsb.GetDBCreator("redis").Create(all)
	if err != nil {
		return fmt.Errorf("connect to Redis: %w", err)
	}
	defer redis.Close()
	start := time.Now()
	client.NewClient(all, core, client.DbWrapper{DB: redis}).Run(context.Background())
	seconds := time.Since(start).Seconds()
	measurement.Output()
	return json.NewEncoder(os.Stdout).Encode(map[string]float64{"seconds": seconds})
}
