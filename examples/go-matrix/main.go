// Go-matrix raises a matrix of big integers to a large power modulo a prime, row by row in several
// goroutines, and writes one line with a digest per bit of the exponent.
//
//	go-matrix -size 32 -bits 300 -seed 1 -out RESULT [-listen :7200]
//
// RESULT depends on size, bits and seed only. RESULT.start is written once, when the program
// starts, with a random nonce: it shows whether a run was resumed or restarted. With -listen, each
// TCP client is told "START nonce STEP n OF bits" and disconnected.
package main

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"fmt"
	"log"
	"math/big"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// prime is 2^521-1.
var prime = new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), 521), big.NewInt(1))

type matrix [][]*big.Int

func main() {
	size := flag.Int("size", 32, "rows and columns")
	bits := flag.Int("bits", 300, "bits of the exponent, one step each")
	seed := flag.Int64("seed", 1, "seed of matrix and exponent")
	goroutines := flag.Int("goroutines", 4, "goroutines that multiply")
	pause := flag.Duration("pause", 0, "what to sleep per step, to stretch a run")
	out := flag.String("out", "", "file for the result (required)")
	listen := flag.String("listen", "", "address that tells the progress")
	flag.Parse()
	if *out == "" {
		log.Fatal("-out is required")
	}

	start := nonce()
	now := time.Now().Format(time.RFC3339Nano)
	begun := fmt.Sprintf("start %s pid %d time %s\n", start, os.Getpid(), now)
	check(os.WriteFile(*out+".start", []byte(begun), 0o644))
	file, err := os.Create(*out)
	check(err)
	var step atomic.Int64
	if *listen != "" {
		listener, err := net.Listen("tcp", *listen)
		check(err)
		go tellProgress(listener, start, &step, *bits)
	}

	base, exponent := generate(*size, *bits, *seed)
	power := identity(*size)
	for bit := *bits - 1; bit >= 0; bit-- {
		power = multiply(power, power, *goroutines)
		if exponent.Bit(bit) == 1 {
			power = multiply(power, base, *goroutines)
		}
		step.Add(1)
		_, err := fmt.Fprintf(file, "step %d %s\n", step.Load(), digest(power))
		check(err)
		time.Sleep(*pause)
	}
	_, err = fmt.Fprintf(file, "result %s\n", digest(power))
	check(err)
	check(file.Close())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func tellProgress(listener net.Listener, start string, step *atomic.Int64, bits int) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			log.Print(err)
			return
		}
		fmt.Fprintf(conn, "START %s STEP %d OF %d\n", start, step.Load(), bits)
		conn.Close()
	}
}

// generate derives the matrix and the exponent from the seed.
func generate(size, bits int, seed int64) (matrix, *big.Int) {
	number := func(what string, index int) *big.Int {
		wide := new(big.Int)
		needed := bits
		if needed < 521 {
			needed = 521
		}
		for block := 0; block <= needed/256; block++ {
			sum := sha256.Sum256(fmt.Appendf(nil, "%d %s %d %d", seed, what, index, block))
			wide.Lsh(wide, 256).Or(wide, new(big.Int).SetBytes(sum[:]))
		}
		return wide
	}
	m := identity(size)
	for i := 0; i < size*size; i++ {
		m[i/size][i%size] = number("entry", i)
		m[i/size][i%size].Mod(m[i/size][i%size], prime)
	}
	limit := new(big.Int).Lsh(big.NewInt(1), uint(bits))
	exponent := number("exponent", 0)
	return m, exponent.Mod(exponent, limit)
}

func identity(size int) matrix {
	m := make(matrix, size)
	for row := range m {
		m[row] = make([]*big.Int, size)
		for column := range m[row] {
			m[row][column] = new(big.Int)
		}
		m[row][row].SetInt64(1)
	}
	return m
}

// multiply gives a·b modulo the prime; the goroutines take rows from a channel.
func multiply(a, b matrix, goroutines int) matrix {
	product := make(matrix, len(a))
	rows := make(chan int)
	var workers sync.WaitGroup
	for i := 0; i < goroutines; i++ {
		workers.Add(1)
		go func() {
			defer workers.Done()
			for row := range rows {
				product[row] = multiplyRow(a[row], b)
			}
		}()
	}
	for row := range a {
		rows <- row
	}
	close(rows)
	workers.Wait()
	return product
}

func multiplyRow(row []*big.Int, b matrix) []*big.Int {
	result := make([]*big.Int, len(row))
	term := new(big.Int)
	for column := range row {
		sum := new(big.Int)
		for k := range row {
			sum.Add(sum, term.Mul(row[k], b[k][column]))
		}
		result[column] = sum.Mod(sum, prime)
	}
	return result
}

func digest(m matrix) string {
	hash := sha256.New()
	for _, row := range m {
		for _, entry := range row {
			fmt.Fprintf(hash, "%x ", entry)
		}
	}
	return fmt.Sprintf("%x", hash.Sum(nil))
}

// nonce is different in every run.
func nonce() string {
	var bytes [16]byte
	if _, err := rand.Read(bytes[:]); err != nil {
		log.Fatal(err)
	}
	return hex.EncodeToString(bytes[:])
}
