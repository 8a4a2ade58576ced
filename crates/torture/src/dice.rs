//! Random choices that a seed repeats.

use std::time::Duration;

/// A source of random numbers: splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom
/// Number Generators, 2014).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    /// Dice of its own for the part with this number, unlike those of any other part.
    pub fn part(&self, number: u64) -> Dice {
        let mut seed = Dice(self.0 ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d));
        Dice(seed.roll())
    }

    /// Any number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number less than `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.roll() % end
    }

    /// True with this probability, from 0.0 to 1.0.
    pub fn chance(&mut self, probability: f64) -> bool {
        ((self.roll() >> 11) as f64) < probability * (1_u64 << 53) as f64
    }

    /// A span from `least` to `most`, to the nanosecond.
    pub fn between(&mut self, least: Duration, most: Duration) -> Duration {
        let room = most.saturating_sub(least).as_nanos() as u64;
        least + Duration::from_nanos(self.below(room + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_numbers_and_parts_differ() {
        let numbers = |mut dice: Dice| [dice.roll(), dice.roll(), dice.roll()];
        assert_eq!(numbers(Dice::new(7)), numbers(Dice::new(7)));
        assert_ne!(numbers(Dice::new(7).part(0)), numbers(Dice::new(7).part(1)));
    }
}
