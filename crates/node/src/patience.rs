//! What to do while no checkpoint can be taken: how long to wait, and when to say so.

use std::time::{Duration, Instant};

use crate::epoch::Obstacle;

/// First wait for a state of the guest that passes; doubled each time.
const FIRST: Duration = Duration::from_millis(2);
const LONGEST: Duration = Duration::from_millis(50);
/// How soon a slow spare may have room again.
const ROOM: Duration = Duration::from_millis(2);
/// Checkpoints that are later than this are told.
const SILENT: Duration = Duration::from_secs(1);

/// Counts the time since something has been in the way.
#[derive(Debug)]
pub struct Patience {
    since: Option<Instant>,
    wait: Duration,
    told: String,
}

impl Default for Patience {
    fn default() -> Self {
        Self { since: None, wait: FIRST, told: String::new() }
    }
}

impl Patience {
    /// Something is in the way: how long to wait, and what to say, if anything.
    pub fn met(&mut self, obstacle: &Obstacle, now: Instant) -> (Duration, Option<String>) {
        let since = *self.since.get_or_insert(now);
        let (wait, what) = match obstacle {
            Obstacle::Work => return (Duration::ZERO, None),
            Obstacle::SlowSpare => {
                (ROOM, "a spare takes checkpoints slower than they come".to_owned())
            }
            Obstacle::SlowStore => {
                (ROOM, "$TMPDIR takes what is to be stored slower than it comes".to_owned())
            }
            Obstacle::Passing(what) => {
                let wait = self.wait;
                self.wait = (wait * 2).min(LONGEST);
                (wait, what.clone())
            }
        };
        let late = now.saturating_duration_since(since) >= SILENT;
        if !late || self.told == what {
            return (wait, None);
        }
        self.told.clone_from(&what);
        (wait, Some(what))
    }

    /// A checkpoint has been taken.
    pub fn taken(&mut self) {
        *self = Self::default();
    }
}

/// Notices spares that take checkpoints and are not heard: the way of the stream is open, that of
/// the heartbeats is not. Such a spare would never take over, so it does not protect.
#[derive(Debug, Default)]
pub struct Unheard {
    since: Option<Instant>,
    told: bool,
}

impl Unheard {
    /// A spare has acknowledged a checkpoint while so many spares were ready; what to say.
    pub fn acknowledged(&mut self, ready: usize, now: Instant) -> Option<&'static str> {
        if ready > 0 {
            *self = Self::default();
            return None;
        }
        let since = *self.since.get_or_insert(now);
        if self.told || now.saturating_duration_since(since) < UNHEARD {
            return None;
        }
        self.told = true;
        Some(
            "NOT PROTECTED: a spare takes checkpoints, but no heartbeat passes between the hosts; \
             let UDP through the firewall, in both directions, on all ports above 1024",
        )
    }
}

/// Heartbeats come every 30 ms.
const UNHEARD: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lasts_is_told_once_and_tried_less_often() {
        let mut patience = Patience::default();
        let start = Instant::now();
        let obstacle = Obstacle::Passing("thread 5: waits".to_owned());
        let (mut now, mut tries, mut told) = (start, 0, Vec::new());
        while now < start + Duration::from_secs(3) {
            let (wait, text) = patience.met(&obstacle, now);
            told.extend(text.map(|text| (text, now - start)));
            now += wait;
            tries += 1;
        }
        assert!(tries < 100, "{tries} tries");
        let [(text, after)] = &told[..] else { panic!("told {told:?}") };
        assert_eq!(text, "thread 5: waits");
        assert!(*after >= SILENT && *after < SILENT + LONGEST);
        let (_, text) = patience.met(&Obstacle::Passing("something else".to_owned()), now);
        assert_eq!(text.as_deref(), Some("something else"));
        patience.taken();
        assert_eq!(patience.met(&obstacle, now), (FIRST, None));
    }

    #[test]
    fn who_is_slow_is_named() {
        let said = |obstacle| {
            let (mut patience, start) = (Patience::default(), Instant::now());
            assert_eq!(patience.met(&obstacle, start), (ROOM, None));
            patience.met(&obstacle, start + SILENT).1.unwrap_or_default()
        };
        assert!(said(Obstacle::SlowSpare).starts_with("a spare "));
        assert!(said(Obstacle::SlowStore).starts_with("$TMPDIR "));
    }

    #[test]
    fn a_spare_that_is_not_heard_is_told_once() {
        let (mut unheard, start) = (Unheard::default(), Instant::now());
        let mut at = |seconds, ready| {
            unheard.acknowledged(ready, start + Duration::from_secs(seconds)).is_some()
        };
        assert!(!at(0, 0) && !at(2, 0) && at(4, 0) && !at(9, 0));
        assert!(!at(10, 1) && !at(11, 0) && at(15, 0));
    }

    #[test]
    fn work_is_gone_on_with_at_once() {
        let mut patience = Patience::default();
        let now = Instant::now();
        for seconds in 0..5 {
            let later = now + Duration::from_secs(seconds);
            assert_eq!(patience.met(&Obstacle::Work, later), (Duration::ZERO, None));
        }
    }
}
