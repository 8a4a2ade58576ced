package main

import (
	"fmt"
	"hash/fnv"
	"os"
	"sort"
	"strings"
)

// job is what the result depends on, and nothing else.
type job struct {
	Seed   uint64
	Chunks int
	Words  int
	Parts  int
}

// text generates chunk number chunk: words of a small vocabulary, the low ones far more often.
func (j job) text(chunk int) []string {
	state := j.Seed*0x9e3779b97f4a7c15 + uint64(chunk)*0xbf58476d1ce4e5b9 + 1
	next := func() uint64 { // splitmix64
		state += 0x9e3779b97f4a7c15
		z := (state ^ state>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		return z ^ z>>31
	}
	words := make([]string, j.Words)
	for i := range words {
		words[i] = word(next() % (next()%5000 + 1))
	}
	return words
}

// word spells number with the letters a to p, so that no two numbers share a word.
func word(number uint64) string {
	var b strings.Builder
	for ; ; number /= 16 {
		b.WriteByte(byte('a' + number%16))
		if number < 16 {
			return b.String()
		}
	}
}

// mapChunk counts the words of one chunk, apart for each reduce task.
func mapChunk(j job, chunk int) []map[string]int {
	parts := make([]map[string]int, j.Parts)
	for i := range parts {
		parts[i] = make(map[string]int)
	}
	for _, w := range j.text(chunk) {
		h := fnv.New32a()
		h.Write([]byte(w))
		parts[h.Sum32()%uint32(j.Parts)][w]++
	}
	return parts
}

// reduce adds up the counts that the chunks have for one part.
func reduce(chunks []map[string]int) map[string]int {
	total := make(map[string]int)
	for _, counts := range chunks {
		for w, n := range counts {
			total[w] += n
		}
	}
	return total
}

// render is the result file: one line per word, sorted.
func render(parts []map[string]int) string {
	all := make(map[string]int)
	for _, part := range parts {
		for w, n := range part {
			all[w] = n
		}
	}
	words := make([]string, 0, len(all))
	for w := range all {
		words = append(words, w)
	}
	sort.Strings(words)
	var b strings.Builder
	for _, w := range words {
		fmt.Fprintf(&b, "%s %d\n", w, all[w])
	}
	return b.String()
}

// reference computes the result without coordinator and workers.
func reference(j job) string {
	intermediate := make([][]map[string]int, j.Parts)
	for chunk := 0; chunk < j.Chunks; chunk++ {
		for part, counts := range mapChunk(j, chunk) {
			intermediate[part] = append(intermediate[part], counts)
		}
	}
	parts := make([]map[string]int, j.Parts)
	for i, chunks := range intermediate {
		parts[i] = reduce(chunks)
	}
	return render(parts)
}

// writeResult puts the result in place whole; an empty path is standard output.
func writeResult(path, result string) error {
	if path == "" {
		_, err := os.Stdout.WriteString(result)
		return err
	}
	if err := os.WriteFile(path+".part", []byte(result), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".part", path)
}
