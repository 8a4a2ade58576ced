// Command go-matrix raises a matrix over a prime field to a power, one multiplication after the
// other, and leaves three files in a directory: starts has a line for each start of the program,
// steps a line for each multiplication, result the digest of the power.
package main

import (
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"runtime"
	"sync"
)

const prime = 1_000_000_007

// matrix is square, row after row.
type matrix struct {
	size  int
	cells []uint64
}

func newMatrix(size int) *matrix {
	return &matrix{size: size, cells: make([]uint64, size*size)}
}

// example is a matrix without zeros or symmetry.
func example(size int) *matrix {
	m := newMatrix(size)
	cell := uint64(1)
	for i := range m.cells {
		cell = (cell*48271 + 11) % prime
		m.cells[i] = cell
	}
	return m
}

// times multiplies on all processors, a band of rows each.
func (m *matrix) times(other *matrix) *matrix {
	product := newMatrix(m.size)
	var bands sync.WaitGroup
	workers := runtime.GOMAXPROCS(0)
	for worker := 0; worker < workers; worker++ {
		from, to := m.size*worker/workers, m.size*(worker+1)/workers
		bands.Add(1)
		go func() {
			defer bands.Done()
			for row := from; row < to; row++ {
				m.timesRow(other, product, row)
			}
		}()
	}
	bands.Wait()
	return product
}

func (m *matrix) timesRow(other, product *matrix, row int) {
	size := m.size
	out := product.cells[row*size : (row+1)*size]
	for k := 0; k < size; k++ {
		factor := m.cells[row*size+k]
		for column, cell := range other.cells[k*size : (k+1)*size] {
			out[column] = (out[column] + factor*cell) % prime
		}
	}
}

func (m *matrix) digest() [sha256.Size]byte {
	bytes := make([]byte, 0, 8*len(m.cells))
	for _, cell := range m.cells {
		bytes = binary.LittleEndian.AppendUint64(bytes, cell)
	}
	return sha256.Sum256(bytes)
}

// note appends a line to a file.
func note(dir, name, line string) error {
	file, err := os.OpenFile(filepath.Join(dir, name), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(file, line)
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	return err
}

func run(dir string, size, power int) error {
	if err := note(dir, "starts", fmt.Sprintf("size %d power %d", size, power)); err != nil {
		return err
	}
	base := example(size)
	product := base
	for step := 2; step <= power; step++ {
		product = product.times(base)
		if err := note(dir, "steps", fmt.Sprintf("%d %d", step, product.cells[0])); err != nil {
			return err
		}
	}
	return note(dir, "result", fmt.Sprintf("%x", product.digest()))
}

func main() {
	dir := flag.String("dir", ".", "where to leave the files")
	size := flag.Int("size", 200, "rows and columns")
	power := flag.Int("power", 200, "exponent")
	flag.Parse()
	if err := run(*dir, *size, *power); err != nil {
		log.Fatal(err)
	}
}
