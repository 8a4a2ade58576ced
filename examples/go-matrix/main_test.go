package main

import (
	"math/big"
	"testing"
)

func TestPowersOfTheFibonacciMatrixHoldFibonacciNumbers(t *testing.T) {
	fibonacci := identity(2)
	fibonacci[0][1].SetInt64(1)
	fibonacci[1][0].SetInt64(1)
	fibonacci[1][1].SetInt64(0)
	power := identity(2)
	for i := 0; i < 50; i++ {
		power = multiply(power, fibonacci, 3)
	}
	if want := big.NewInt(12586269025); power[0][1].Cmp(want) != 0 {
		t.Errorf("got %v, want %v", power[0][1], want)
	}
}

func TestTheResultDoesNotDependOnTheNumberOfGoroutines(t *testing.T) {
	base, _ := generate(8, 64, 3)
	want := digest(multiply(base, base, 1))
	for _, goroutines := range []int{2, 5, 20} {
		if got := digest(multiply(base, base, goroutines)); got != want {
			t.Errorf("%d goroutines: got %s, want %s", goroutines, got, want)
		}
	}
}
