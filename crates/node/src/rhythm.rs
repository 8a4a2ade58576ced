//! How long the guest runs between two checkpoints.
//!
//! With `--epoch auto` that follows from what checkpoints cost. While nobody waits for one, the
//! time that each takes (copying beside the guest, the pause, sending) is to be a twentieth of all
//! time: a guest that writes little is checkpointed often, one that writes much seldom. While
//! clients wait for one it comes as soon as the one before is acknowledged, but not before the
//! guest has run as long as it stood still: under load more answers then share a checkpoint, and
//! one client alone never waits for that.

use std::time::{Duration, Instant};

/// Part of all time that checkpoints may take, as its inverse.
const COST_SHARE: u32 = 20;
/// How long the guest runs at least, in pauses.
const RUNS_PAUSES: u32 = 1;
/// Least and most between two checkpoints that nobody waits for.
const LEAST: Duration = Duration::from_millis(10);
/// See [`LEAST`].
pub const MOST: Duration = Duration::from_millis(500);
/// A new measurement counts for one part in so many.
const MEMORY: u32 = 8;

/// `--epoch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epochs {
    /// So long.
    Every(Duration),
    /// As long as it fits the guest.
    Auto,
}

impl Epochs {
    /// Reads an argument.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => crate::cli::duration(text).map(Self::Every),
        }
    }

    /// The longest that there is between two checkpoints of a guest that is not in the way.
    pub fn longest(self) -> Duration {
        match self {
            Self::Every(length) => length,
            Self::Auto => MOST,
        }
    }
}

/// What checkpoints cost lately.
#[derive(Debug)]
pub struct Rhythm {
    epochs: Epochs,
    pause: Duration,
    cost: Duration,
    resumed: Option<Instant>,
}

impl Rhythm {
    /// Nothing is known yet.
    pub fn new(epochs: Epochs) -> Self {
        Self { epochs, pause: Duration::ZERO, cost: Duration::ZERO, resumed: None }
    }

    /// A checkpoint has been taken at the cost of so much time, in which the guest stood still for
    /// `pause`.
    pub fn taken(&mut self, pause: Duration, cost: Duration, now: Instant) {
        let mix = |before: Duration, new: Duration| match before.is_zero() {
            true => new,
            false => (before * (MEMORY - 1) + new) / MEMORY,
        };
        (self.pause, self.cost) = (mix(self.pause, pause), mix(self.cost, cost));
        self.resumed = Some(now);
    }

    /// How long after one that took `cost` the next is due, if nobody waits for it.
    pub fn length(&self, cost: Duration) -> Duration {
        match self.epochs {
            Epochs::Every(length) => length.saturating_sub(cost),
            Epochs::Auto => (self.cost * (COST_SHARE - 1)).clamp(LEAST, MOST),
        }
    }

    /// Before this instant there is none, even if somebody waits for it.
    pub fn earliest(&self) -> Option<Instant> {
        match self.epochs {
            Epochs::Every(_) => None,
            Epochs::Auto => Some(self.resumed? + self.pause * RUNS_PAUSES),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_fixed_length_counts_from_the_beginning_of_the_one_before() {
        let mut rhythm = Rhythm::new(Epochs::parse("100ms").unwrap());
        rhythm.taken(2 * MS, 30 * MS, Instant::now());
        assert_eq!(rhythm.length(30 * MS), 70 * MS);
        assert_eq!(rhythm.length(130 * MS), Duration::ZERO);
        assert_eq!(rhythm.earliest(), None);
    }

    #[test]
    fn dear_checkpoints_are_rare_and_cheap_ones_frequent() {
        let now = Instant::now();
        let length = |cost| {
            let mut rhythm = Rhythm::new(Epochs::Auto);
            rhythm.taken(MS, cost, now);
            rhythm.length(cost)
        };
        assert_eq!(length(MS / 10), LEAST);
        assert_eq!(length(2 * MS), 38 * MS);
        assert_eq!(length(300 * MS), MOST);
    }

    #[test]
    fn the_guest_runs_as_long_as_it_stood_still_though_clients_wait() {
        let (mut rhythm, now) = (Rhythm::new(Epochs::Auto), Instant::now());
        assert_eq!(rhythm.earliest(), None);
        rhythm.taken(4 * MS, 9 * MS, now);
        assert_eq!(rhythm.earliest(), Some(now + 4 * MS));
        // One that was hard does not count for more than its part.
        rhythm.taken(12 * MS, 9 * MS, now);
        assert_eq!(rhythm.earliest(), Some(now + 5 * MS));
    }

    #[test]
    fn what_is_no_length_is_refused() {
        assert_eq!(Epochs::parse("auto"), Ok(Epochs::Auto));
        assert!(Epochs::parse("often").is_err());
        assert_eq!(Epochs::Auto.longest(), MOST);
    }
}
