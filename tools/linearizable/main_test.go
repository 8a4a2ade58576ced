package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// history is one operation a line: op value call return result; a return of - is no reply.
func status(t *testing.T, key, history string) int {
	t.Helper()
	var lines []string
	for _, line := range strings.Split(strings.TrimSpace(history), "\n") {
		words := strings.Split(strings.TrimSpace(line), " ")
		done := words[3]
		if done == "-" {
			done = "null"
		}
		lines = append(lines, `{"client":1,"key":"`+key+`","op":"`+words[0]+`","value":"`+words[1]+
			`","call":`+words[2]+`,"return":`+done+`,"result":"`+strings.Trim(words[4], "_")+`"}`)
	}
	path := filepath.Join(t.TempDir(), "history")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	return check(path)
}

func expect(t *testing.T, wanted int, history string) {
	t.Helper()
	if found := status(t, "k", history); found != wanted {
		t.Errorf("%d, not %d:\n%s", found, wanted, history)
	}
}

func TestWhatWasAcknowledgedIsReadByWhoeverAsksLater(t *testing.T) {
	expect(t, 0, "set 1 0 9 OK\nget _ 10 12 1")
	expect(t, 1, "set 1 0 9 OK\nget _ 10 12 nil")
	expect(t, 1, "set 1 0 9 OK\nset 2 10 19 OK\nget _ 20 22 1")
}

func TestOperationsAtTheSameTimeHaveAnyOrder(t *testing.T) {
	expect(t, 0, "set 1 0 9 OK\nset 2 1 8 OK\nget _ 10 12 1")
	expect(t, 0, "set 1 0 9 OK\nget _ 1 8 nil")
	expect(t, 1, "set 1 0 9 OK\nget _ 1 2 1\nget _ 3 4 nil")
}

func TestWhatHadNoReplyIsDoneAtAnyTimeLaterOrNever(t *testing.T) {
	expect(t, 0, "set 1 0 - _\nget _ 10 12 nil\nget _ 20 22 1")
	expect(t, 0, "set 1 0 - _\nget _ 10 12 nil")
	expect(t, 1, "set 1 5 - _\nget _ 1 3 1")
	expect(t, 1, "set 1 0 - _\nget _ 10 12 1\nget _ 20 22 nil")
}

func TestListsKeepTheirOrder(t *testing.T) {
	two := "push 1 0 1 1\npush 2 2 3 2\n"
	expect(t, 0, two+"range _ 4 5 1,2\npop _ 6 7 1\npop _ 8 9 2\npop _ 10 11 nil")
	expect(t, 1, two+"range _ 4 5 2,1")
	// Done twice.
	expect(t, 1, "push 1 0 1 1\nrange _ 4 5 1,1")
	// Lost.
	expect(t, 1, "push 1 0 1 1\nswap 2 2 3 nil")
}
