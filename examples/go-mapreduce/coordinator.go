package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"sort"
	"strings"
	"sync"
	"time"
)

// Phases of a job, in their order.
const (
	mapping  = "map"
	reducing = "reduce"
	finished = "finished"
)

// Task is what a worker is to do. One without a phase means: ask again later.
type Task struct {
	Phase  string
	Number int
	// Text is what a map task counts.
	Text string `json:",omitempty"`
	// Counts are what a reduce task adds up.
	Counts []map[string]int `json:",omitempty"`
	// Buckets is the number of parts that a map task makes.
	Buckets int
}

// Result is what has become of a task: a part for each bucket from a map task, one part from a
// reduce task.
type Result struct {
	Phase  string
	Number int
	Parts  []map[string]int
}

// job is the state of the coordinator.
type job struct {
	mu      sync.Mutex
	splits  []string
	buckets int
	lease   time.Duration
	phase   string
	// given is when a task was last given to a worker.
	given  []time.Time
	mapped []*Result
	counts []map[string]int
	done   chan struct{}
}

func newJob(text string, splits, buckets int, lease time.Duration) *job {
	return &job{
		splits:  split(text, splits),
		buckets: buckets,
		lease:   lease,
		phase:   mapping,
		given:   make([]time.Time, splits),
		mapped:  make([]*Result, splits),
		counts:  make([]map[string]int, buckets),
		done:    make(chan struct{}),
	}
}

// split cuts text between words into pieces of about the same length.
func split(text string, pieces int) []string {
	words := strings.Fields(text)
	splits := make([]string, pieces)
	for i := range splits {
		splits[i] = strings.Join(words[len(words)*i/pieces:len(words)*(i+1)/pieces], " ")
	}
	return splits
}

// next is the task for a worker that asks at this instant.
func (j *job) next(now time.Time) Task {
	j.mu.Lock()
	defer j.mu.Unlock()
	for number := range j.given {
		if j.isDone(number) || now.Sub(j.given[number]) < j.lease {
			continue
		}
		j.given[number] = now
		return j.task(number)
	}
	if j.phase == finished {
		return Task{Phase: finished}
	}
	return Task{}
}

func (j *job) isDone(number int) bool {
	switch j.phase {
	case mapping:
		return j.mapped[number] != nil
	case reducing:
		return j.counts[number] != nil
	default:
		return true
	}
}

func (j *job) task(number int) Task {
	task := Task{Phase: j.phase, Number: number, Buckets: j.buckets}
	if j.phase == mapping {
		task.Text = j.splits[number]
		return task
	}
	for _, mapped := range j.mapped {
		task.Counts = append(task.Counts, mapped.Parts[number])
	}
	return task
}

// accept takes a result, the first one of each task. Others are late and the same.
func (j *job) accept(result Result) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if result.Phase != j.phase || j.phase == finished {
		return nil
	}
	if result.Number < 0 || result.Number >= len(j.given) {
		return fmt.Errorf("no task %d", result.Number)
	}
	if j.isDone(result.Number) {
		return nil
	}
	if j.phase == mapping {
		if len(result.Parts) != j.buckets {
			return fmt.Errorf("%d parts, not %d", len(result.Parts), j.buckets)
		}
		j.mapped[result.Number] = &result
	} else {
		if len(result.Parts) != 1 {
			return fmt.Errorf("%d parts, not 1", len(result.Parts))
		}
		j.counts[result.Number] = result.Parts[0]
	}
	j.advance()
	return nil
}

// advance goes on to the next phase when every task of this one is done.
func (j *job) advance() {
	for number := range j.given {
		if !j.isDone(number) {
			return
		}
	}
	if j.phase == mapping {
		j.phase = reducing
		j.given = make([]time.Time, j.buckets)
		return
	}
	j.phase = finished
	close(j.done)
}

// table is the counts of all words, a line each, in order.
func (j *job) table() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	var lines []string
	for _, counts := range j.counts {
		for word, count := range counts {
			lines = append(lines, fmt.Sprintf("%s %d\n", word, count))
		}
	}
	sort.Strings(lines)
	return strings.Join(lines, "")
}

func (j *job) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.Method + " " + r.URL.Path {
	case "GET /task":
		w.Header().Set("Content-Type", "application/json")
		// A worker that has gone away leaves the task to another.
		_ = json.NewEncoder(w).Encode(j.next(time.Now()))
	case "POST /result":
		var result Result
		err := json.NewDecoder(r.Body).Decode(&result)
		if err == nil {
			err = j.accept(result)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
	default:
		http.NotFound(w, r)
	}
}

func coordinate(listen, input, output string, splits, buckets int, lease time.Duration) error {
	text, err := os.ReadFile(input)
	if err != nil {
		return err
	}
	job := newJob(string(text), splits, buckets, lease)
	failed := make(chan error, 1)
	go func() { failed <- http.ListenAndServe(listen, job) }()
	select {
	case err := <-failed:
		return err
	case <-job.done:
		return os.WriteFile(output, []byte(job.table()), 0o644)
	}
}
