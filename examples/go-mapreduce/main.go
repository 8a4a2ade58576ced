// Command go-mapreduce counts words. A coordinator hands out tasks over HTTP and collects what
// workers make of them; workers come and go, and ask again when nobody answers.
//
//	go-mapreduce coordinator -listen :8000 -input text -output counts
//	go-mapreduce worker -coordinator http://10.0.0.1:8000
package main

import (
	"flag"
	"log"
	"os"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		log.Fatal("usage: go-mapreduce coordinator|worker [flags]")
	}
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	var err error
	switch os.Args[1] {
	case "coordinator":
		listen := flags.String("listen", ":8000", "address to listen on")
		input := flags.String("input", "", "text to count the words of")
		output := flags.String("output", "", "file for the counts")
		splits := flags.Int("splits", 64, "pieces of the text")
		buckets := flags.Int("buckets", 8, "parts of the counts")
		lease := flags.Duration("lease", time.Second, "time for a task before it is given again")
		flags.Parse(os.Args[2:])
		err = coordinate(*listen, *input, *output, *splits, *buckets, *lease)
	case "worker":
		coordinator := flags.String("coordinator", "", "address of the coordinator")
		pause := flags.Duration("pause", 20*time.Millisecond, "between two attempts to reach it")
		delay := flags.Duration("delay", 0, "that every task takes longer")
		patience := flags.Duration("patience", time.Minute, "without an answer before it gives up")
		flags.Parse(os.Args[2:])
		err = work(*coordinator, *pause, *delay, *patience)
	default:
		log.Fatalf("no such part: %s", os.Args[1])
	}
	if err != nil {
		log.Fatal(err)
	}
}
