//! What comes before the guest runs, and in which order the rest follows.
//!
//! FREM waits for the whole touch set. But it is known when each page was touched first, and, once
//! the first of them are here, how fast they come: the guest may start as soon as, from then on, no
//! page comes later than it was touched after the checkpoint, as a film can be shown while its end
//! is still being sent. Or even before: whoever waits for a page that is on its way is no later
//! than if all had waited for it.

use std::time::Duration;

use hotspare_image::memory::PAGE_BYTES;
use hotspare_image::source::Span;
use hotspare_image::touch::TouchSet;

/// When a guest whose memory comes behind it may start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// When what it touched in its first moments is there, or [`EARLY_BYTES`] of that. It may have
    /// to wait for the rest.
    #[default]
    Early,
    /// When, at the bandwidth that is measured meanwhile, it will find each page of the touch set
    /// there at the time of its first touch.
    Smooth,
    /// When the whole touch set is there, as FREM does.
    Touched,
}

/// In which order memory comes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Before the guest runs.
    pub first: Vec<Span>,
    /// Behind it, in this order, before everything else.
    pub then: Vec<Due>,
}

/// What was touched for the first time in one part of the tracking window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Due {
    /// How long after its start the guest is expected to touch it; if not given, it may wait.
    pub after: Option<Duration>,
    /// The pages.
    pub spans: Vec<Span>,
}

/// What was touched until then after the checkpoint belongs to the first moments.
const FIRST_MOMENTS_MS: u32 = 20;
/// Of what is touched in the first moments no more is waited for. A server finds what its first
/// requests need; who goes over all of its memory at once is not helped by waiting.
pub const EARLY_BYTES: u64 = 2 << 20;

impl Plan {
    /// The plan for a touch set.
    #[must_use]
    pub fn new(touched: &TouchSet, start: Start) -> Self {
        let mut plan = Self::default();
        let (mut from_ms, mut room) = (0, u64::MAX);
        if start == Start::Early {
            room = EARLY_BYTES / PAGE_BYTES;
        }
        for group in &touched.groups {
            let is_first = match start {
                Start::Touched => true,
                Start::Smooth => from_ms == 0,
                Start::Early => from_ms == 0 || group.until_ms <= FIRST_MOMENTS_MS,
            };
            let after = Duration::from_millis(from_ms.into());
            let after = (start == Start::Smooth).then_some(after);
            let mut spans = Vec::new();
            for span in &group.spans {
                let now = if is_first { span.pages.min(room) } else { 0 };
                room -= now;
                let start = span.start + now * PAGE_BYTES;
                plan.first.extend((now > 0).then_some(Span { pages: now, ..*span }));
                let pages = span.pages - now;
                spans.extend((pages > 0).then_some(Span { start, pages, ..*span }));
            }
            if !spans.is_empty() {
                plan.then.push(Due { after, spans });
            }
            // It may be wanted as soon as its part of the window begins.
            from_ms = group.until_ms;
        }
        plan
    }
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
        TouchSet { groups: groups.collect(), has_reads: true, ..TouchSet::default() }
    }

    /// In pages.
    const MIB: u64 = 256;

    fn pages(spans: &[Span]) -> u64 {
        spans.iter().map(|span| span.pages).sum()
    }

    #[test]
    fn only_what_is_touched_at_once_comes_first() {
        let touched = set(&[(5, 9), (10, 2 * 9), (20, 4 * 9), (40, 9), (80, 9)]);
        let plan = Plan::new(&touched, Start::Early);
        assert_eq!((pages(&plan.first), plan.then.len()), (7 * 9, 2));
        assert!(plan.then.iter().all(|due| due.after.is_none()));
        let plan = Plan::new(&touched, Start::Smooth);
        let after = |due: &Due| due.after.map(|after| after.as_millis());
        let dues: Vec<_> = plan.then.iter().map(after).collect();
        assert_eq!(pages(&plan.first), 9);
        assert_eq!(dues, [Some(5), Some(10), Some(20), Some(40)]);
        let plan = Plan::new(&touched, Start::Touched);
        assert_eq!((pages(&plan.first), plan.then.len()), (9 * 9, 0));
    }

    #[test]
    fn who_touches_much_at_once_does_not_wait_for_all_of_it() {
        let touched = set(&[(1010, MIB), (2010, MIB)]);
        assert_eq!(Plan::new(&touched, Start::Early).then.len(), 1);
        let touched = set(&[(5, 100 * MIB), (10, MIB)]);
        let plan = Plan::new(&touched, Start::Early);
        let then: u64 = plan.then.iter().map(|due| pages(&due.spans)).sum();
        assert_eq!((pages(&plan.first), then), (EARLY_BYTES / PAGE_BYTES, 99 * MIB));
        assert_eq!(plan.then[0].spans[0].start, plan.first[0].end());
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
}
