//! The right to speak for the guest, as long as it lasts.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hotspare_image::NodeId;
use nix::time::{ClockId, clock_gettime};

/// Nanoseconds since this machine was started, those that it slept included.
#[must_use]
pub fn boot_ns() -> u64 {
    // The clock is there since Linux 2.6.39; without it no lease lasts.
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME);
    now.map_or(u64::MAX, |now| {
        (now.tv_sec() as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec() as u64)
    })
}

/// A lease that whoever lets packets out looks at before each.
///
/// Between the look and the packet the thread can be stopped, for however long. One packet per
/// thread can be late by that, which nothing here bounds. It is one that all heirs have, or one of
/// a guest that nobody may inherit, if output waits for commits; else it is as old as a network
/// may make any.
#[derive(Debug)]
pub struct Lease {
    until: AtomicU64,
    /// No acknowledgement holds it up beyond this. Whoever changes the above has this.
    until_at_most: Mutex<u64>,
    length_ns: u64,
    heirs: Mutex<Heirs>,
}

/// Who may take the term from us.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heirs {
    /// As the arbiter has them, or may have them by now.
    pub nodes: BTreeSet<NodeId>,
    /// They wait for nothing: whatever leaves, they have to have.
    pub at_once: bool,
}

impl Heirs {
    /// Whether output has to wait for some of them.
    #[must_use]
    pub fn are_awaited(&self) -> bool {
        self.at_once && !self.nodes.is_empty()
    }
}

impl Lease {
    /// One that has not begun.
    #[must_use]
    pub fn new(length: Duration) -> Self {
        Self {
            until: AtomicU64::new(0),
            until_at_most: Mutex::new(0),
            length_ns: length.as_nanos() as u64,
            heirs: Mutex::default(),
        }
    }

    /// Whether it lasts at this instant.
    #[must_use]
    pub fn holds(&self) -> bool {
        boot_ns() < self.until()
    }

    /// When it ends, by [`boot_ns`].
    #[must_use]
    pub fn until(&self) -> u64 {
        self.until.load(Ordering::Acquire)
    }

    /// How much of it is left.
    #[must_use]
    pub fn rest(&self) -> Duration {
        Duration::from_nanos(self.until().saturating_sub(boot_ns()))
    }

    /// The arbiter has written what was sent at `sent`. From then on acknowledgements of heirs may
    /// hold the lease up for `at_most`.
    pub fn renew(&self, sent: u64, at_most: Duration) {
        let mut most = self.at_most();
        *most = sent + at_most.as_nanos() as u64;
        let until = self.until().min(*most).max(sent + self.length_ns);
        self.until.store(until, Ordering::Release);
    }

    /// What is being sent at `sent` may leave no heirs, whose acknowledgements then mean nothing.
    pub fn without_heirs(&self, sent: u64) {
        let mut most = self.at_most();
        *most = (*most).min(sent + self.length_ns);
    }

    /// All heirs have acknowledged what was sent after `sent`.
    pub fn extend_from(&self, sent: u64) {
        let most = self.at_most();
        let until = (sent + self.length_ns).min(*most).max(self.until());
        self.until.store(until, Ordering::Release);
    }

    /// It is somebody else's now.
    pub fn end(&self) {
        *self.at_most() = 0;
        self.until.store(0, Ordering::Release);
    }

    fn at_most(&self) -> MutexGuard<'_, u64> {
        self.until_at_most.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who may take the term from us.
    pub fn heirs(&self) -> MutexGuard<'_, Heirs> {
        self.heirs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_counts_from_before_it_was_asked_for_and_ends_by_itself() {
        let lease = Lease::new(Duration::from_secs(3600));
        assert!(!lease.holds());
        let sent = boot_ns();
        lease.renew(sent, Duration::from_secs(7200));
        assert!(lease.holds() && lease.until() == sent + 3_600_000_000_000);
        let long_ago = Lease::new(Duration::from_nanos(1));
        long_ago.renew(sent, Duration::from_secs(1));
        assert!(!long_ago.holds());
    }

    #[test]
    fn acknowledgements_hold_it_up_but_not_for_ever() {
        let lease = Lease::new(Duration::from_secs(10));
        lease.renew(1_000_000_000, Duration::from_secs(60));
        lease.extend_from(31_000_000_000);
        assert_eq!(lease.until(), 41_000_000_000);
        lease.extend_from(90_000_000_000);
        assert_eq!(lease.until(), 61_000_000_000);
        lease.without_heirs(2_000_000_000);
        lease.extend_from(52_000_000_000);
        assert_eq!(lease.until(), 61_000_000_000);
        lease.renew(2_000_000_000, Duration::from_secs(10));
        assert_eq!(lease.until(), 12_000_000_000, "the heirs are struck out");
        lease.end();
        lease.extend_from(90_000_000_000);
        assert_eq!(lease.until(), 0);
    }
}
