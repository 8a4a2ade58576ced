//! How long the guest runs between two checkpoints.
//!
//! With `--epoch auto` that follows from what checkpoints cost. While nobody waits for one, the
//! time that each takes (copying beside the guest, the pause, sending) is to be a twentieth of all
//! time: a guest that writes little is checkpointed often, one that writes much seldom. While
//! clients wait for one it comes as soon as the one before is acknowledged, as ever, or when those
//! are back who were answered by that (`hotspare_net`, `company`). (To let the
//! guest first run for as long as it had stood still was tried: replies of a saturated Redis on 256
//! connections were 8,300 and 8,350 a second with it, 8,000 and 9,600 without.)

use std::time::Duration;

/// Part of all time that checkpoints may take, as its inverse.
const COST_SHARE: u32 = 20;
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
    cost: Duration,
}

impl Rhythm {
    /// Nothing is known yet.
    pub fn new(epochs: Epochs) -> Self {
        Self { epochs, cost: Duration::ZERO }
    }

    /// A checkpoint has taken so long; how long after it the next is due, if nobody waits for it.
    pub fn taken(&mut self, cost: Duration) -> Duration {
        self.cost = match self.cost.is_zero() {
            true => cost,
            false => (self.cost * (MEMORY - 1) + cost) / MEMORY,
        };
        match self.epochs {
            Epochs::Every(length) => length.saturating_sub(cost),
            Epochs::Auto => (self.cost * (COST_SHARE - 1)).clamp(LEAST, MOST),
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
        assert_eq!(rhythm.taken(30 * MS), 70 * MS);
        assert_eq!(rhythm.taken(130 * MS), Duration::ZERO);
    }

    #[test]
    fn dear_checkpoints_are_rare_and_cheap_ones_frequent() {
        let length = |cost| Rhythm::new(Epochs::Auto).taken(cost);
        assert_eq!(length(MS / 10), LEAST);
        assert_eq!(length(2 * MS), 38 * MS);
        assert_eq!(length(300 * MS), MOST);
    }

    #[test]
    fn one_that_was_dear_counts_for_its_part() {
        let mut rhythm = Rhythm::new(Epochs::Auto);
        rhythm.taken(2 * MS);
        assert_eq!(rhythm.taken(10 * MS), 57 * MS);
    }

    #[test]
    fn what_is_no_length_is_refused() {
        assert_eq!(Epochs::parse("auto"), Ok(Epochs::Auto));
        assert!(Epochs::parse("often").is_err());
        assert_eq!(Epochs::Auto.longest(), MOST);
    }
}
