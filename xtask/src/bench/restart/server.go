// A key-value server with clients of its own.
package main

import (
	"bufio"
	"fmt"
	"math/rand"
	"net"
	"sync"
	"time"
)

func main() {
	values, lock := map[int][]byte{}, sync.RWMutex{}
	for key := 0; key < 400000; key++ {
		values[key] = []byte(fmt.Sprintf("value %080d", key))
	}
	listener, err := net.Listen("tcp", "127.0.0.1:7001")
	if err != nil {
		panic(err)
	}
	go func() {
		for {
			stream, err := listener.Accept()
			if err != nil {
				panic(err)
			}
			go func() {
				lines := bufio.NewScanner(stream)
				for lines.Scan() {
					var key int
					fmt.Sscan(lines.Text(), &key)
					lock.RLock()
					value := values[key]
					lock.RUnlock()
					fmt.Fprintf(stream, "%s\n", value)
				}
			}()
		}
	}()
	stream, err := net.Dial("tcp", "127.0.0.1:7001")
	if err != nil {
		panic(err)
	}
	replies := bufio.NewScanner(stream)
	for n := 1; ; n++ {
		fmt.Fprintf(stream, "%d\n", rand.Intn(len(values)))
		if !replies.Scan() {
			panic("no reply")
		}
		if n%1000 == 0 {
			fmt.Println(n)
		}
		time.Sleep(200 * time.Microsecond)
	}
}
