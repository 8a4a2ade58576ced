package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

var small = job{Seed: 7, Chunks: 6, Words: 500, Parts: 3}

func newCoordinator(t *testing.T) *coordinator {
	return &coordinator{
		job:     small,
		out:     filepath.Join(t.TempDir(), "result"),
		lease:   time.Hour,
		maps:    make([]task, small.Chunks),
		reduces: make([]task, small.Parts),
		mapped:  make([][]map[string]int, small.Chunks),
		reduced: make([]map[string]int, small.Parts),
	}
}

func perform(r reply) request {
	q := request{Ask: "deliver", Kind: r.Kind, Number: r.Number}
	if r.Kind == kindMap {
		q.Parts = mapChunk(r.Job, r.Number)
	} else {
		q.Parts = []map[string]int{reduce(r.Counts)}
	}
	return q
}

func TestDeliveringEverythingTwiceGivesTheReferenceResult(t *testing.T) {
	c := newCoordinator(t)
	r := c.answer(request{Ask: "next"})
	for r.Kind != kindDone {
		q := perform(r)
		c.deliver(q)
		r = c.answer(q)
	}
	got, err := os.ReadFile(c.out)
	if err != nil || string(got) != reference(small) {
		t.Fatalf("result differs from the reference (%v)", err)
	}
	if want := small.Chunks + small.Parts; c.status.Repeated != want {
		t.Errorf("repeated %d, want %d", c.status.Repeated, want)
	}
}

func TestATaskWhoseLeaseHasRunOutIsGivenAgain(t *testing.T) {
	c := newCoordinator(t)
	c.lease = 0
	first, second := c.answer(request{Ask: "next"}), c.answer(request{Ask: "next"})
	if first.Number != second.Number {
		t.Errorf("got task %d, want %d again", second.Number, first.Number)
	}
	c.lease = time.Hour
	if third := c.answer(request{Ask: "next"}); third.Number == first.Number {
		t.Error("a task was given out twice within its lease")
	}
}

func TestMalformedDeliveriesChangeNothing(t *testing.T) {
	c := newCoordinator(t)
	for _, q := range []request{
		{Ask: "deliver", Kind: kindMap, Number: -1},
		{Ask: "deliver", Kind: kindMap, Number: 99},
		{Ask: "deliver", Kind: kindMap, Number: 0},
		{Ask: "deliver", Kind: "other", Number: 0},
	} {
		c.answer(q)
	}
	if c.status.MapsDone != 0 || c.maps[0].done {
		t.Errorf("status %+v", c.status)
	}
}
