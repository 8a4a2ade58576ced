//! How long a checkpoint waits for a state to pass that it could carry only in part.

use std::time::{Duration, Instant};

/// Most programs read what waits for them within milliseconds.
const PATIENCE: Duration = Duration::from_millis(500);

/// Remembers since when attempts have met a state that might pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct Patience {
    since: Option<Instant>,
    met: bool,
}

impl Patience {
    /// An attempt begins. One that met nothing ends the wait.
    pub fn begin_attempt(&mut self) {
        if !std::mem::take(&mut self.met) {
            self.since = None;
        }
    }

    /// The state is met. True once attempts have met it for half a second: it must be carried as
    /// well as it can be, or a program that stays so would never be protected.
    pub fn is_exhausted(&mut self) -> bool {
        self.met = true;
        self.since.get_or_insert_with(Instant::now).elapsed() >= PATIENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_without_the_obstacle_starts_the_wait_anew() {
        let mut patience = Patience::default();
        patience.begin_attempt();
        assert!(!patience.is_exhausted());
        patience.since = patience.since.map(|since| since - PATIENCE);
        patience.begin_attempt();
        assert!(patience.is_exhausted());
        patience.begin_attempt();
        patience.begin_attempt();
        assert!(!patience.is_exhausted());
    }
}
