package main

import "testing"

func TestEveryCommandAnswersAsDocumented(t *testing.T) {
	s := &server{start: "START x 1", values: map[string]string{}}
	for _, step := range []struct{ ask, want string }{
		{"PING", "PONG"},
		{"START", "START x 1"},
		{"GET a", "NONE"},
		{"SET a one two", "OK"},
		{"GET a", "VALUE one two"},
		{"SET a", "ERROR usage: SET key value"},
		{"INCR a", "ERROR not a number"},
		{"INCR n", "VALUE 1"},
		{"incr n", "VALUE 2"},
		{"CAS n 1 9", "MISMATCH 2"},
		{"CAS n 2 nine lives", "OK"},
		{"GET n", "VALUE nine lives"},
		{"CAS none 1 2", "NONE"},
		{"COUNT", "COUNT 2"},
		{"DEL a", "OK"},
		{"DEL a", "NONE"},
		{"COUNT", "COUNT 1"},
		{"NOPE", "ERROR unknown command"},
	} {
		if got := s.answer(step.ask); got != step.want {
			t.Errorf("%s: got %q, want %q", step.ask, got, step.want)
		}
	}
}
