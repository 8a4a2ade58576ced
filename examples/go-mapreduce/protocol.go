package main

// A worker sends one JSON request after the other and reads one reply for each.

const (
	kindMap    = "map"    // count the words of chunk Number
	kindReduce = "reduce" // add up Counts for part Number
	kindWait   = "wait"   // nothing to do at the moment
	kindDone   = "done"   // the result is there
)

// request asks for a task ("next"), delivers one ("deliver") or asks how far it is ("status").
type request struct {
	Ask    string
	Worker string
	Kind   string           `json:",omitempty"`
	Number int              `json:",omitempty"`
	Parts  []map[string]int `json:",omitempty"`
}

// reply is a task, or to a status request the state of the job. Tasks are named by kind and
// number, so that delivering one twice changes nothing.
type reply struct {
	Kind   string
	Number int
	Job    job
	Counts []map[string]int `json:",omitempty"`
	Status *status          `json:",omitempty"`
}

type status struct {
	Start       string // drawn once when the coordinator starts
	MapsDone    int
	ReducesDone int
	Repeated    int // deliveries of tasks that were done already
	Done        bool
}
