package main

import (
	"encoding/json"
	"fmt"
	"log"
	"net"
	"os"
	"time"
)

// patience is how long a worker waits for a reply before it dials again: the coordinator's host
// may have died without a word.
const patience = 3 * time.Second

// work does tasks until the coordinator says that the job is done.
func work(address string, pause time.Duration) {
	q := request{Ask: "next", Worker: fmt.Sprintf("%d", os.Getpid())}
	for {
		done, err := session(address, &q, pause)
		if done {
			return
		}
		log.Printf("dialling again: %v", err)
		time.Sleep(50 * time.Millisecond)
	}
}

// session works over one connection. After an error q is what has not been acknowledged.
func session(address string, q *request, pause time.Duration) (done bool, err error) {
	conn, err := net.DialTimeout("tcp", address, patience)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	in, out := json.NewDecoder(conn), json.NewEncoder(conn)
	for {
		conn.SetDeadline(time.Now().Add(patience))
		if err := out.Encode(q); err != nil {
			return false, err
		}
		var r reply
		if err := in.Decode(&r); err != nil {
			return false, err
		}
		time.Sleep(pause)
		*q = request{Ask: "next", Worker: q.Worker}
		switch r.Kind {
		case kindDone:
			return true, nil
		case kindWait:
			time.Sleep(20 * time.Millisecond)
		case kindMap:
			q.Ask, q.Kind, q.Number = "deliver", kindMap, r.Number
			q.Parts = mapChunk(r.Job, r.Number)
		case kindReduce:
			q.Ask, q.Kind, q.Number = "deliver", kindReduce, r.Number
			q.Parts = []map[string]int{reduce(r.Counts)}
		}
	}
}

func printStatus(address string) error {
	conn, err := net.DialTimeout("tcp", address, patience)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	if err := json.NewEncoder(conn).Encode(request{Ask: "status"}); err != nil {
		return err
	}
	var r reply
	if err := json.NewDecoder(conn).Decode(&r); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r.Status)
}
