// Go-mapreduce counts words in generated text: a coordinator that keeps all state in memory, and
// workers that dial it, redial when the connection breaks, and repeat what was not acknowledged.
//
//	go-mapreduce coordinator -listen :7100 -seed 1 -chunks 64 -words 20000 -out RESULT
//	go-mapreduce worker -dial HOST:7100
//	go-mapreduce status -dial HOST:7100
//	go-mapreduce reference -seed 1 -chunks 64 -words 20000 -out RESULT
//
// Reference computes the same result in one process: the two files are byte-equal.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		fatalUsage()
	}
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	listen := flags.String("listen", ":7100", "address the coordinator listens on")
	dial := flags.String("dial", "127.0.0.1:7100", "address of the coordinator")
	out := flags.String("out", "", "file for the result")
	pause := flags.Duration("pause", 0, "what a worker sleeps per task, to stretch a run")
	var job job
	flags.Uint64Var(&job.Seed, "seed", 1, "seed of the text")
	flags.IntVar(&job.Chunks, "chunks", 64, "number of chunks of text, one map task each")
	flags.IntVar(&job.Words, "words", 20000, "words per chunk")
	flags.IntVar(&job.Parts, "parts", 8, "number of reduce tasks")
	lease := flags.Duration("lease", 2*time.Second, "time after which a task is given out again")
	flags.Parse(os.Args[2:])

	var err error
	switch os.Args[1] {
	case "coordinator":
		err = coordinate(*listen, *out, job, *lease)
	case "worker":
		work(*dial, *pause)
	case "status":
		err = printStatus(*dial)
	case "reference":
		err = writeResult(*out, reference(job))
	default:
		fatalUsage()
	}
	if err != nil {
		log.Fatal(err)
	}
}

func fatalUsage() {
	fmt.Fprintln(os.Stderr, "usage: go-mapreduce coordinator|worker|status|reference [flags]")
	os.Exit(2)
}
