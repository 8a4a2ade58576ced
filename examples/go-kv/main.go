// Command go-kv is a key-value server. A request is a line, a reply is a line:
//
//	SET key value   OK
//	GET key         VALUE value, or NONE
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"strings"
	"sync"
)

func main() {
	listen := flag.String("listen", ":8000", "address to listen on")
	flag.Parse()

	listener, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	store := newStore()
	for {
		conn, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			log.Print(err)
			continue
		}
		go serve(conn, store)
	}
}

// store is a map that many goroutines use.
type store struct {
	mu     sync.RWMutex
	values map[string]string
}

func newStore() *store {
	return &store{values: make(map[string]string)}
}

func (s *store) set(key, value string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values[key] = value
}

func (s *store) get(key string) (string, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	value, ok := s.values[key]
	return value, ok
}

// serve answers the requests of one connection, in order, until it is closed. Replies go out when
// no further request is waiting.
func serve(conn net.Conn, store *store) {
	defer conn.Close()
	in, out := bufio.NewReader(conn), bufio.NewWriter(conn)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		fmt.Fprintln(out, answer(strings.TrimRight(line, "\r\n"), store))
		if in.Buffered() == 0 {
			if err := out.Flush(); err != nil {
				return
			}
		}
	}
}

func answer(request string, store *store) string {
	verb, rest, _ := strings.Cut(request, " ")
	switch verb {
	case "SET":
		key, value, ok := strings.Cut(rest, " ")
		if !ok {
			return "ERROR SET key value"
		}
		store.set(key, value)
		return "OK"
	case "GET":
		if value, ok := store.get(rest); ok {
			return "VALUE " + value
		}
		return "NONE"
	default:
		return "ERROR no such request"
	}
}
