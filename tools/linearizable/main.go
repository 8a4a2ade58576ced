// Linearizable tells whether there is an order in which a history of operations on the registers
// and lists of a Redis makes sense: each operation at one instant between its call and its return.
//
//	linearizable FILE...    one JSON object a line: client, key, op, value, call, return, result
//
// The exit status is 0 if there is one, 1 if not (a picture is written to FILE.html), 2 if that
// could not be found out. An operation without "return" had no reply: it may have been done at any
// time after its call, or never.
//
// The search is Porcupine's (Athalye; after Wing and Gong, and Lowe).
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"sort"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// The longest search for one file. Histories of campaigns take milliseconds.
const searchAtMost = 2 * time.Minute

type operation struct {
	Client int    `json:"client"`
	Key    string `json:"key"`
	Op     string `json:"op"`
	Value  string `json:"value"`
	Call   int64  `json:"call"`
	Return *int64 `json:"return"`
	Result string `json:"result"`
}

// What there is of a key before its first operation.
const nothing = ""

// apply says what an operation answers in a state, and the state after it.
func (o operation) apply(state string) (answer, after string) {
	switch o.Op {
	case "get":
		return orNil(state), state
	case "set":
		return "OK", o.Value
	case "swap":
		return orNil(state), o.Value
	case "push":
		after = join(state, o.Value)
		return fmt.Sprint(strings.Count(after, ",") + 1), after
	case "pop":
		first, rest, _ := strings.Cut(state, ",")
		return orNil(first), rest
	case "range":
		return state, state
	}
	panic("unknown operation " + o.Op)
}

func orNil(value string) string {
	if value == nothing {
		return "nil"
	}
	return value
}

func join(list, item string) string {
	if list == nothing {
		return item
	}
	return list + "," + item
}

var model = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		keys := map[string][]porcupine.Operation{}
		for _, one := range history {
			key := one.Input.(operation).Key
			keys[key] = append(keys[key], one)
		}
		var parts [][]porcupine.Operation
		for _, part := range keys {
			parts = append(parts, part)
		}
		return parts
	},
	Init: func() interface{} { return nothing },
	Step: func(state, input, output interface{}) (bool, interface{}) {
		op := input.(operation)
		answer, after := op.apply(state.(string))
		return op.Return == nil || answer == output.(string), after
	},
	DescribeOperation: func(input, output interface{}) string {
		op := input.(operation)
		if op.Return == nil {
			return fmt.Sprintf("%s %s %s: no reply", op.Op, op.Key, op.Value)
		}
		return fmt.Sprintf("%s %s %s: %s", op.Op, op.Key, op.Value, output)
	},
}

func read(path string) ([]porcupine.Operation, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var history []porcupine.Operation
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 64<<20)
	for number := 1; lines.Scan(); number++ {
		var op operation
		if err := json.Unmarshal(lines.Bytes(), &op); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
		done := int64(math.MaxInt64)
		if op.Return != nil {
			done = *op.Return
		} else if op.Op == "get" || op.Op == "range" {
			// Nobody knows what it has read, and it changes nothing.
			continue
		}
		history = append(history, porcupine.Operation{
			ClientId: op.Client, Input: op, Call: op.Call, Output: op.Result, Return: done,
		})
	}
	return history, lines.Err()
}

// wrongKeys are those whose operations make no sense in any order.
func wrongKeys(history []porcupine.Operation) []string {
	var keys []string
	for _, part := range model.Partition(history) {
		if porcupine.CheckOperationsTimeout(model, part, searchAtMost) == porcupine.Illegal {
			keys = append(keys, part[0].Input.(operation).Key)
		}
	}
	sort.Strings(keys)
	return keys
}

// check prints what it finds and gives the exit status.
func check(path string) int {
	history, err := read(path)
	if err != nil {
		fmt.Fprintln(os.Stderr, "linearizable:", err)
		return 2
	}
	result, info := porcupine.CheckOperationsVerbose(model, history, searchAtMost)
	switch result {
	case porcupine.Ok:
		fmt.Printf("%s: %d operations are linearizable\n", path, len(history))
		return 0
	case porcupine.Illegal:
		fmt.Printf("%s: NOT linearizable: %s\n", path, strings.Join(wrongKeys(history), " "))
		if err := porcupine.VisualizePath(model, info, path+".html"); err != nil {
			fmt.Fprintln(os.Stderr, "linearizable: no picture:", err)
		}
		return 1
	}
	fmt.Fprintf(os.Stderr, "linearizable: %s: not found out in %v\n", path, searchAtMost)
	return 2
}

func main() {
	status := 0
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: linearizable FILE...")
		os.Exit(2)
	}
	for _, path := range os.Args[1:] {
		if found := check(path); found > status {
			status = found
		}
	}
	os.Exit(status)
}
