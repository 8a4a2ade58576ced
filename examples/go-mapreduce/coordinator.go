package main

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"log"
	"net"
	"sync"
	"time"
)

type coordinator struct {
	job   job
	out   string
	lease time.Duration

	mu      sync.Mutex
	status  status
	maps    []task
	reduces []task
	mapped  [][]map[string]int // by chunk, then part
	reduced []map[string]int   // by part
}

type task struct {
	done  bool
	given time.Time // when it was last given to a worker
}

func coordinate(listen, out string, job job, lease time.Duration) error {
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	c := &coordinator{
		job:     job,
		out:     out,
		lease:   lease,
		status:  status{Start: nonce()},
		maps:    make([]task, job.Chunks),
		reduces: make([]task, job.Parts),
		mapped:  make([][]map[string]int, job.Chunks),
		reduced: make([]map[string]int, job.Parts),
	}
	log.Printf("listening on %s", listener.Addr())
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		go c.serve(conn)
	}
}

func (c *coordinator) serve(conn net.Conn) {
	defer conn.Close()
	in, out := json.NewDecoder(conn), json.NewEncoder(conn)
	for {
		var q request
		if in.Decode(&q) != nil {
			return
		}
		if out.Encode(c.answer(q)) != nil {
			return
		}
	}
}

func (c *coordinator) answer(q request) reply {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch q.Ask {
	case "deliver":
		c.deliver(q)
	case "status":
		now := c.status
		return reply{Status: &now}
	}
	return c.next()
}

// next is the first task that is neither done nor with a worker whose lease still runs.
func (c *coordinator) next() reply {
	if c.status.Done {
		return reply{Kind: kindDone}
	}
	kind, tasks := kindMap, c.maps
	if c.status.MapsDone == len(c.maps) {
		kind, tasks = kindReduce, c.reduces
	}
	for i := range tasks {
		if tasks[i].done || time.Since(tasks[i].given) < c.lease {
			continue
		}
		tasks[i].given = time.Now()
		r := reply{Kind: kind, Number: i, Job: c.job}
		if kind == kindReduce {
			for chunk := range c.mapped {
				r.Counts = append(r.Counts, c.mapped[chunk][i])
			}
		}
		return r
	}
	return reply{Kind: kindWait}
}

// deliver takes the result of a task; the first delivery counts.
func (c *coordinator) deliver(q request) {
	switch {
	case q.Kind == kindMap && c.accept(c.maps, q.Number, len(q.Parts) == c.job.Parts):
		c.mapped[q.Number] = q.Parts
		c.status.MapsDone++
	case q.Kind == kindReduce && c.accept(c.reduces, q.Number, len(q.Parts) == 1):
		c.reduced[q.Number] = q.Parts[0]
		c.status.ReducesDone++
		if c.status.ReducesDone == len(c.reduces) {
			c.finish()
		}
	}
}

func (c *coordinator) accept(tasks []task, number int, wellFormed bool) bool {
	if number < 0 || number >= len(tasks) || !wellFormed {
		return false
	}
	if tasks[number].done {
		c.status.Repeated++
		return false
	}
	tasks[number].done = true
	return true
}

func (c *coordinator) finish() {
	if err := writeResult(c.out, render(c.reduced)); err != nil {
		log.Fatal(err)
	}
	c.status.Done = true
	log.Printf("done: %+v", c.status)
}

// nonce is different in every run.
func nonce() string {
	var bytes [16]byte
	if _, err := rand.Read(bytes[:]); err != nil {
		log.Fatal(err)
	}
	return hex.EncodeToString(bytes[:])
}
