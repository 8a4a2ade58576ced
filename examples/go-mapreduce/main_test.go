package main

import (
	"net/http/httptest"
	"testing"
	"time"
)

func TestWorkersCountWords(t *testing.T) {
	job := newJob("b a b c b a", 3, 2, time.Minute)
	server := httptest.NewServer(job)
	defer server.Close()
	if err := work(server.URL, time.Millisecond, 0, time.Minute); err != nil {
		t.Fatal(err)
	}
	if table := job.table(); table != "a 2\nb 3\nc 1\n" {
		t.Errorf("counted %q", table)
	}
}

func TestATaskIsGivenAgainWhenItsLeaseEnds(t *testing.T) {
	job := newJob("a", 1, 1, time.Minute)
	now := time.Now()
	if task := job.next(now); task.Phase != mapping {
		t.Fatalf("first: %+v", task)
	}
	if task := job.next(now.Add(time.Second)); task.Phase != "" {
		t.Fatalf("while leased: %+v", task)
	}
	if task := job.next(now.Add(time.Hour)); task.Phase != mapping {
		t.Fatalf("after the lease: %+v", task)
	}
}

func TestALateResultChangesNothing(t *testing.T) {
	job := newJob("a a", 1, 1, time.Minute)
	task := job.next(time.Now())
	for range [2]int{} {
		if err := job.accept(do(task)); err != nil {
			t.Fatal(err)
		}
	}
	if job.phase != reducing {
		t.Errorf("phase %s", job.phase)
	}
}
