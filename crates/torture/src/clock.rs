//! The one clock of a simulated network: all hosts share the kernel, so all share its
//! CLOCK_MONOTONIC, and instants taken on different hosts compare.

use std::ops::{Add, Sub};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// An instant of CLOCK_MONOTONIC, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Instant(pub u64);

impl Instant {
    /// The present.
    pub fn now() -> Instant {
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("CLOCK_MONOTONIC always exists");
        Instant(now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64)
    }

    /// The span from `earlier` to this instant; zero if `earlier` is later.
    pub fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Lets the calling thread sleep until this instant. For pacing a load, not for waiting on a
    /// condition.
    pub fn sleep_until(self) {
        std::thread::sleep(self.since(Instant::now()));
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, span: Duration) -> Instant {
        Instant(self.0 + span.as_nanos() as u64)
    }
}

impl Sub<Duration> for Instant {
    type Output = Instant;

    fn sub(self, span: Duration) -> Instant {
        Instant(self.0.saturating_sub(span.as_nanos() as u64))
    }
}

/// A span in milliseconds, for reports.
pub fn millis(span: Duration) -> f64 {
    span.as_secs_f64() * 1e3
}
