// Go-kv is a key-value server in memory with a line protocol over TCP.
//
//	PING                -> PONG
//	SET key value       -> OK
//	GET key             -> VALUE value | NONE
//	DEL key             -> OK | NONE
//	INCR key            -> VALUE n | ERROR
//	CAS key old new     -> OK | MISMATCH value | NONE
//	COUNT               -> COUNT n
//	START               -> START nonce unix-nanoseconds (drawn once, when the program starts)
//
// Keys, and the old value of CAS, have no spaces; the last argument of SET and CAS may.
package main

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"flag"
	"fmt"
	"log"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

type server struct {
	start string

	mu     sync.RWMutex
	values map[string]string
}

func main() {
	listen := flag.String("listen", ":7000", "address to listen on")
	flag.Parse()
	listener, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	s := &server{
		start:  fmt.Sprintf("START %s %d", nonce(), time.Now().UnixNano()),
		values: make(map[string]string),
	}
	log.Printf("listening on %s", listener.Addr())
	for {
		conn, err := listener.Accept()
		if err != nil {
			log.Print(err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		go s.serve(conn)
	}
}

// serve answers the requests of one client in order until it hangs up.
func (s *server) serve(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReader(conn)
	out := bufio.NewWriter(conn)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		out.WriteString(s.answer(strings.TrimRight(line, "\r\n")))
		out.WriteByte('\n')
		// Pipelined requests are answered in one write.
		if in.Buffered() == 0 && out.Flush() != nil {
			return
		}
	}
}

func (s *server) answer(line string) string {
	command, rest, _ := strings.Cut(line, " ")
	key, rest, hasValue := strings.Cut(rest, " ")
	switch strings.ToUpper(command) {
	case "PING":
		return "PONG"
	case "START":
		return s.start
	case "COUNT":
		s.mu.RLock()
		defer s.mu.RUnlock()
		return fmt.Sprintf("COUNT %d", len(s.values))
	case "GET":
		s.mu.RLock()
		defer s.mu.RUnlock()
		return valueOrNone(s.values[key], has(s.values, key))
	case "SET":
		if !hasValue {
			return "ERROR usage: SET key value"
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.values[key] = rest
		return "OK"
	case "DEL":
		return s.delete(key)
	case "INCR":
		return s.increment(key)
	case "CAS":
		before, after, ok := strings.Cut(rest, " ")
		if !ok {
			return "ERROR usage: CAS key old new"
		}
		return s.compareAndSet(key, before, after)
	}
	return "ERROR unknown command"
}

func (s *server) delete(key string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !has(s.values, key) {
		return "NONE"
	}
	delete(s.values, key)
	return "OK"
}

func (s *server) increment(key string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	number := 0
	if value, ok := s.values[key]; ok {
		var err error
		if number, err = strconv.Atoi(value); err != nil {
			return "ERROR not a number"
		}
	}
	s.values[key] = strconv.Itoa(number + 1)
	return "VALUE " + s.values[key]
}

func (s *server) compareAndSet(key, before, after string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, ok := s.values[key]
	switch {
	case !ok:
		return "NONE"
	case value != before:
		return "MISMATCH " + value
	}
	s.values[key] = after
	return "OK"
}

func has(values map[string]string, key string) bool {
	_, ok := values[key]
	return ok
}

func valueOrNone(value string, ok bool) string {
	if !ok {
		return "NONE"
	}
	return "VALUE " + value
}

// nonce is different in every run.
func nonce() string {
	var bytes [16]byte
	if _, err := rand.Read(bytes[:]); err != nil {
		log.Fatal(err)
	}
	return hex.EncodeToString(bytes[:])
}
