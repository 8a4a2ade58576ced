package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"net/http"
	"strings"
	"time"
)

// work does tasks until there are none, or until nobody has answered for so long as patience.
func work(coordinator string, pause, delay, patience time.Duration) error {
	client := &http.Client{Timeout: 2 * time.Second}
	answered := time.Now()
	for time.Since(answered) < patience {
		task, err := ask(client, coordinator)
		if err == nil && task.Phase != "" && task.Phase != finished {
			time.Sleep(delay)
			err = tell(client, coordinator, do(task))
		}
		if err != nil || task.Phase == "" {
			time.Sleep(pause)
		}
		if err == nil {
			answered = time.Now()
			if task.Phase == finished {
				return nil
			}
		}
	}
	return fmt.Errorf("no answer from %s for %v", coordinator, patience)
}

func ask(client *http.Client, coordinator string) (Task, error) {
	var task Task
	reply, err := client.Get(coordinator + "/task")
	if err != nil {
		return task, err
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusOK {
		return task, fmt.Errorf("asked for a task: %s", reply.Status)
	}
	err = json.NewDecoder(reply.Body).Decode(&task)
	return task, err
}

func tell(client *http.Client, coordinator string, result Result) error {
	body, err := json.Marshal(result)
	if err != nil {
		return err
	}
	reply, err := client.Post(coordinator+"/result", "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusOK {
		return fmt.Errorf("told a result: %s", reply.Status)
	}
	return nil
}

func do(task Task) Result {
	result := Result{Phase: task.Phase, Number: task.Number}
	if task.Phase == mapping {
		result.Parts = count(task.Text, task.Buckets)
	} else {
		result.Parts = []map[string]int{sum(task.Counts)}
	}
	return result
}

// count gives the words of a text to buckets by their hash.
func count(text string, buckets int) []map[string]int {
	parts := make([]map[string]int, buckets)
	for i := range parts {
		parts[i] = make(map[string]int)
	}
	for _, word := range strings.Fields(text) {
		hash := fnv.New32a()
		hash.Write([]byte(word))
		parts[hash.Sum32()%uint32(buckets)][word]++
	}
	return parts
}

func sum(counts []map[string]int) map[string]int {
	total := make(map[string]int)
	for _, part := range counts {
		for word, count := range part {
			total[word] += count
		}
	}
	return total
}
