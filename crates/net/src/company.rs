//! Company: output that is worth waiting for before a checkpoint is taken.
//!
//! Clients that were just answered are about to ask again. A checkpoint for the first of them to be
//! answered anew covers him alone, and all others wait for it and for the next one: so clients fall
//! into two companies that wait for each other, and each checkpoint does half of what it could. If
//! the first waits a moment for the others, all are covered by one (group commit: DeWitt et al.,
//! Implementation techniques for main memory database systems, SIGMOD 1984).
//!
//! One client has no company and waits for nobody. Clients that do not come back that soon, since
//! they are far away or have nothing to ask, are waited for ever more seldom.

use std::time::{Duration, Instant};

/// How long, after clients were answered, the first answer waits for others at most.
const PATIENCE: Duration = Duration::from_millis(1);
/// Of so many that were answered one may be missing.
const FORGIVEN: usize = 8;
/// So many checkpoints are taken at once, at most, before it is tried again.
const TRIED_ANEW: u32 = 64;

/// Packets with something to say, since the guest was stopped for a checkpoint.
#[derive(Debug, Default)]
pub(crate) struct Company {
    /// That the guest has sent.
    sent: usize,
    /// Those of an earlier checkpoint that have left since, and when the last of them did.
    answered: usize,
    since: Option<Instant>,
    /// What it had sent when the first of them left.
    before: usize,
    /// Waiting was in vain: so many checkpoints do not wait, the next time that it is.
    vain: u32,
    /// So many do not now.
    hurry: u32,
}

impl Company {
    /// The guest has sent a packet.
    pub fn sent(&mut self) {
        self.sent += 1;
    }

    /// A packet has left for its receiver.
    pub fn answered(&mut self, now: Instant) {
        if self.answered == 0 {
            self.before = self.sent;
        }
        self.answered += 1;
        self.since = Some(now);
    }

    /// Whether those who were answered have been answered anew, or were none.
    fn is_complete(&self) -> bool {
        self.sent >= self.before + self.answered - self.answered / FORGIVEN
    }

    /// Until when the next checkpoint waits for more; `None` if it does not.
    pub fn until(&self) -> Option<Instant> {
        let waits = self.hurry == 0 && !self.is_complete();
        self.since.filter(|_| waits).map(|since| since + PATIENCE)
    }

    /// The guest is stopped for a checkpoint that covers all that it has sent.
    pub fn cut(&mut self) {
        if self.sent == 0 {
            // Nobody waits for this one.
        } else if self.hurry > 0 {
            self.hurry -= 1;
        } else if !self.is_complete() {
            self.vain = (self.vain * 2).clamp(1, TRIED_ANEW);
            self.hurry = self.vain;
        } else if self.answered > 0 {
            self.vain /= 2;
        }
        let Self { vain, hurry, .. } = *self;
        *self = Self { vain, hurry, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(company: &mut Company, answered: usize, sent: usize) -> bool {
        let now = Instant::now();
        (0..answered).for_each(|_| company.answered(now));
        (0..sent).for_each(|_| company.sent());
        let waits = company.until();
        assert!(waits.is_none_or(|until| until == now + PATIENCE));
        company.cut();
        waits.is_some()
    }

    #[test]
    fn a_checkpoint_waits_until_those_who_were_answered_are_back() {
        let mut company = Company::default();
        let now = Instant::now();
        // Two wait for the next checkpoint while three are answered.
        (0..2).for_each(|_| company.sent());
        (0..3).for_each(|_| company.answered(now));
        for _ in 0..3 {
            assert_eq!(company.until(), Some(now + PATIENCE));
            company.sent();
        }
        assert_eq!(company.until(), None);
        company.cut();
        assert_eq!(company.until(), None, "nobody has been answered since");
        // Of many, some need not come back.
        (0..80).for_each(|_| company.answered(now));
        (0..69).for_each(|_| company.sent());
        assert_eq!(company.until(), Some(now + PATIENCE));
        company.sent();
        assert_eq!(company.until(), None);
    }

    #[test]
    fn one_alone_does_not_wait() {
        let mut company = Company::default();
        for _ in 0..10 {
            assert!(!round(&mut company, 1, 1));
        }
    }

    #[test]
    fn an_idle_guest_says_nothing_of_its_clients() {
        let mut company = Company::default();
        for _ in 0..100 {
            round(&mut company, 8, 0);
        }
        assert_eq!((company.vain, company.hurry), (0, 0));
        assert!(round(&mut company, 8, 1));
    }

    #[test]
    fn who_does_not_come_back_is_waited_for_more_and_more_seldom() {
        let mut company = Company::default();
        let waits = (0..1000).filter(|_| round(&mut company, 10, 1)).count();
        assert!((7..25).contains(&waits), "{waits}");
        // And as before once they do.
        let back = (0..1000).filter(|_| round(&mut company, 10, 10)).count();
        assert_eq!(back, 0, "nobody had to be waited for");
        assert_eq!(company.vain, 0);
        assert!(round(&mut company, 10, 1));
        assert!(!round(&mut company, 10, 1), "the next does not wait");
        assert!(round(&mut company, 10, 1));
    }
}
