//! What comes before the guest runs, and in which order the rest follows.
//!
//! FREM waits for the whole touch set. But it is known when each page was touched first, and when
//! it can be here: the guest may start as soon as, from then on, no page comes later than it was
//! touched after the checkpoint, as a film can be shown while its end is still being sent.

use std::time::Duration;

use hotspare_image::memory::PAGE_BYTES;
use hotspare_image::source::Span;
use hotspare_image::touch::TouchSet;

/// In which order memory comes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Before the guest runs.
    pub first: Vec<Span>,
    /// Behind it, before everything else.
    pub then: Vec<Span>,
}

impl Plan {
    /// The plan for a touch set and a line of so many bytes a second. If that is not known, all of
    /// the touch set comes first.
    #[must_use]
    pub fn new(touched: &TouchSet, bytes_per_second: Option<u64>) -> Self {
        let head_start = bytes_per_second.map_or(u64::MAX, |rate| head_start(touched, rate));
        let mut plan = Self::default();
        let mut bytes = 0;
        for span in touched.groups.iter().flat_map(|group| &group.spans) {
            let target = if bytes < head_start { &mut plan.first } else { &mut plan.then };
            target.push(*span);
            bytes += span.pages * PAGE_BYTES;
        }
        plan
    }
}

/// Bytes that must be there at the start.
fn head_start(touched: &TouchSet, rate: u64) -> u64 {
    let (mut bytes, mut from, mut most) = (0u64, 0u64, 0u64);
    for group in &touched.groups {
        bytes += group.pages() * PAGE_BYTES;
        // It may be wanted as soon as its part of the window begins.
        let meanwhile = (u128::from(from) * u128::from(rate) / 1000).min(u64::MAX.into()) as u64;
        most = most.max(bytes.saturating_sub(meanwhile));
        from = u64::from(group.until_ms);
    }
    most
}

/// How long touches are tracked after a checkpoint.
///
/// A restarted program should find all that it touches until the rest has been loaded behind it.
/// So the window is long enough when it has lasted as long as loading that rest takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// Bytes a second that a restart gets.
    pub bytes_per_second: u64,
    /// Longer than this it never is.
    pub most: Duration,
}

/// What is thought of lines that nothing is known of.
const USUAL_RATE: u64 = 64 << 20;
/// Never shorter: starting takes some time itself.
const LEAST: Duration = Duration::from_millis(500);

impl Default for Window {
    fn default() -> Self {
        Self { bytes_per_second: USUAL_RATE, most: Duration::from_secs(30) }
    }
}

impl Window {
    /// Whether it has lasted long enough, when `touched` of the checkpoint's bytes have been
    /// touched in it.
    #[must_use]
    pub fn is_over(&self, lasted: Duration, bytes: u64, touched: u64) -> bool {
        lasted >= self.wanted(bytes.saturating_sub(touched))
    }

    fn wanted(&self, rest: u64) -> Duration {
        let load = rest as f64 / self.bytes_per_second.max(1) as f64;
        Duration::try_from_secs_f64(load).unwrap_or(self.most).clamp(LEAST, self.most.max(LEAST))
    }

    /// When to look the `number`th time: often at first, when the order matters most.
    #[must_use]
    pub fn look_at(number: u32) -> Duration {
        Duration::from_millis(5).saturating_mul(2u32.saturating_pow(number.min(20)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotspare_image::memory::{MmId, PageOwner};
    use hotspare_image::touch::TouchGroup;
    use proptest::prelude::*;

    fn group(until_ms: u32, start: u64, pages: u64) -> TouchGroup {
        let owner = PageOwner::Mm(MmId(1));
        TouchGroup { until_ms, spans: vec![Span { owner, start: start * PAGE_BYTES, pages }] }
    }

    fn set(groups: &[(u32, u64)]) -> TouchSet {
        let mut start = 0;
        let groups = groups.iter().map(|&(until_ms, pages)| {
            start += 10_000;
            group(until_ms, start, pages)
        });
        TouchSet { groups: groups.collect(), has_reads: true }
    }

    const MIB: u64 = 256;

    #[test]
    fn a_program_that_touches_slowly_starts_with_its_first_pages() {
        // 1 MiB at once, then 1 MiB in each second, over a line of 2 MiB a second.
        let touched = set(&[(10, MIB), (1010, MIB), (2010, MIB), (3010, MIB)]);
        let plan = Plan::new(&touched, Some(2 << 20));
        let first: u64 = plan.first.iter().map(|span| span.pages).sum();
        assert_eq!((first, plan.then.len()), (2 * MIB, 2));
    }

    #[test]
    fn a_program_that_touches_everything_at_once_waits_for_everything() {
        let touched = set(&[(5, MIB), (10, 100 * MIB), (20, MIB)]);
        let plan = Plan::new(&touched, Some(1 << 20));
        assert!(plan.then.is_empty());
        assert_eq!(Plan::new(&touched, None).first.len(), 3);
    }

    #[test]
    fn the_window_ends_when_the_rest_would_be_there() {
        let window = Window { bytes_per_second: 10 << 20, ..Window::default() };
        let second = Duration::from_secs(1);
        assert!(!window.is_over(second, 100 << 20, 10 << 20));
        assert!(window.is_over(9 * second, 100 << 20, 10 << 20));
        // Who has touched everything is done; nobody is tracked for ever.
        assert!(window.is_over(second, 100 << 20, 100 << 20));
        assert!(window.is_over(30 * second, 1 << 50, 0));
        assert!(!window.is_over(Duration::ZERO, 0, 0));
    }

    proptest! {
        /// From the start on, everything is there when it is first wanted.
        #[test]
        fn nothing_comes_later_than_it_was_touched(
            parts in prop::collection::vec((1u32..500, 0u64..2000), 1..10),
            rate in 1u64..(64 << 20),
        ) {
            let mut until = 0;
            let parts = parts.into_iter().map(|(ms, pages)| {
                until += ms;
                (until, pages)
            });
            let touched = set(&parts.collect::<Vec<_>>());
            let start = head_start(&touched, rate);
            let (mut bytes, mut from) = (0u64, 0u64);
            for group in &touched.groups {
                bytes += group.pages() * PAGE_BYTES;
                prop_assert!(bytes <= start + rate * from / 1000 + 1);
                from = u64::from(group.until_ms);
            }
            let plan = Plan::new(&touched, Some(rate));
            let all: u64 = plan.first.iter().chain(&plan.then).map(|span| span.pages).sum();
            prop_assert_eq!(all, touched.pages());
        }
    }
}
