//! What comes before the guest runs, and in which order the rest follows.
//!
//! FREM waits for the whole touch set. But it is known when each page was touched first, and, once
//! the first of them are here, how fast they come: the guest may start as soon as, from then on, no
//! page comes later than it was touched after the checkpoint, as a film can be shown while its end
//! is still being sent. Or even before: whoever waits for a page that is on its way is no later
//! than if all had waited for it.

use std::time::Duration;

use hotspare_image::source::{PageSource, Span};
use hotspare_image::touch::{TouchGroup, TouchSet};

use super::{by_owner, spans_of};

/// When a guest whose memory comes behind it may start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// When what it touched in its first moments is there, or as much of that as comes with
    /// [`EARLY_BYTES`]. It may have to wait for the rest.
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
    /// Before this one of `then` comes memory in small mappings: a page of it is likelier to be
    /// touched than one of a large heap.
    pub small_before: Option<usize>,
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
/// Of what is touched in the first moments no more is waited for, as it is stored. A server finds
/// what its first requests need; who goes over all of its memory at once is not helped by waiting.
const EARLY_BYTES: u64 = 1 << 20;

/// What was touched in the first moments of two windows one after the other.
#[must_use]
pub fn steady(before: &TouchSet, touched: &TouchSet) -> Vec<Span> {
    let first = |touched: &TouchSet| {
        let moments = first_moments(touched);
        by_owner(&moments.iter().flat_map(|group| &group.spans).copied().collect::<Vec<_>>())
    };
    let (before, mut steady) = (first(before), Vec::new());
    for (owner, pages) in first(touched) {
        let both = before.get(&owner).map(|before| pages.common(before)).unwrap_or_default();
        steady.extend(spans_of(owner, &both));
    }
    steady
}

/// The groups of the first moments: at least one, if there is any.
fn first_moments(touched: &TouchSet) -> &[TouchGroup] {
    let count = touched.groups.partition_point(|group| group.until_ms <= FIRST_MOMENTS_MS);
    &touched.groups[..count.max(1).min(touched.groups.len())]
}

/// What was touched in them.
fn seen_at_once(touched: &TouchSet) -> Vec<Span> {
    first_moments(touched).iter().flat_map(|group| &group.spans).copied().collect()
}

impl Plan {
    /// The plan for a touch set, of pages that come from `source`.
    #[must_use]
    pub fn new(touched: &TouchSet, start: Start, source: &dyn PageSource) -> Self {
        match start {
            Start::Early => Self::early(touched, source),
            Start::Smooth => Self::in_time(touched, 1),
            Start::Touched => Self::in_time(touched, usize::MAX),
        }
    }

    /// What comes first in such a plan, which is known sooner than all of it.
    #[must_use]
    pub fn first_of(touched: &TouchSet, start: Start, source: &dyn PageSource) -> Vec<Span> {
        match start {
            Start::Early => Self::earliest(touched, source).0,
            Start::Smooth | Start::Touched => Self::new(touched, start, source).first,
        }
    }

    /// What an early start waits for, and what else is wanted at once.
    fn earliest(touched: &TouchSet, source: &dyn PageSource) -> (Vec<Span>, Vec<Span>) {
        if touched.steady.is_empty() {
            source.cheapest(&seen_at_once(touched), EARLY_BYTES)
        } else {
            source.cheapest(&touched.steady, EARLY_BYTES)
        }
    }

    fn early(touched: &TouchSet, source: &dyn PageSource) -> Self {
        let (first, dear) = Self::earliest(touched, source);
        let small_before = Some(usize::from(!dear.is_empty()));
        let is_known = !touched.steady.is_empty();
        let seen = if is_known { source.dense(&seen_at_once(touched)) } else { Vec::new() };
        let moments = first_moments(touched);
        let later = touched.groups[moments.len()..].iter().map(|group| source.dense(&group.spans));
        let then = [dear, seen].into_iter().chain(later).filter(|spans| !spans.is_empty());
        let then = then.map(|spans| Due { after: None, spans }).collect();
        Self { first, then, small_before }
    }

    /// So many groups come first, the others when they are due.
    fn in_time(touched: &TouchSet, first: usize) -> Self {
        let mut plan = Self::default();
        let mut from_ms = 0;
        for (at, group) in touched.groups.iter().enumerate() {
            if at < first {
                plan.first.extend(&group.spans);
            } else {
                // It may be wanted as soon as its part of the window begins.
                let after = Some(Duration::from_millis(from_ms.into()));
                plan.then.push(Due { after, spans: group.spans.clone() });
            }
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
    use hotspare_image::memory::{MmId, PAGE_BYTES, PageOwner};
    use hotspare_image::source::{Block, SourceError};

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

    fn pages(spans: &[Span]) -> u64 {
        spans.iter().map(|span| span.pages).sum()
    }

    /// A source in which large pieces cost too much.
    struct Dear(u64);

    impl PageSource for Dear {
        fn read(&self, _: &[Span]) -> Result<Vec<Block>, SourceError> {
            Err(SourceError::Gone("a plan reads nothing".into()))
        }

        fn cheapest(&self, spans: &[Span], _: u64) -> (Vec<Span>, Vec<Span>) {
            spans.iter().partition(|span| span.pages < self.0)
        }

        fn dense(&self, spans: &[Span]) -> Vec<Span> {
            spans.iter().filter(|span| span.pages != 7).copied().collect()
        }

        fn all(&self) -> Vec<Span> {
            Vec::new()
        }
    }

    #[test]
    fn only_what_is_touched_at_once_comes_first() {
        let touched = set(&[(5, 9), (10, 2 * 9), (20, 4 * 9), (40, 9), (80, 9)]);
        let plan = Plan::new(&touched, Start::Early, &Dear(1000));
        assert_eq!((pages(&plan.first), plan.then.len()), (7 * 9, 2));
        assert!(plan.then.iter().all(|due| due.after.is_none()));
        let plan = Plan::new(&touched, Start::Smooth, &Dear(0));
        let after = |due: &Due| due.after.map(|after| after.as_millis());
        let dues: Vec<_> = plan.then.iter().map(after).collect();
        assert_eq!(pages(&plan.first), 9);
        assert_eq!(dues, [Some(5), Some(10), Some(20), Some(40)]);
        let plan = Plan::new(&touched, Start::Touched, &Dear(0));
        assert_eq!((pages(&plan.first), plan.then.len()), (9 * 9, 0));
    }

    #[test]
    fn what_is_dear_is_not_waited_for() {
        let touched = set(&[(5, 10), (10, 100), (500, 7), (1010, 8)]);
        let plan = Plan::new(&touched, Start::Early, &Dear(50));
        let then: Vec<u64> = plan.then.iter().map(|due| pages(&due.spans)).collect();
        assert_eq!((pages(&plan.first), then), (10, vec![100, 8]));
        assert!(Plan::new(&TouchSet::default(), Start::Early, &Dear(50)).then.is_empty());
    }

    #[test]
    fn what_the_program_goes_by_comes_before_what_it_happens_to_work_on() {
        let part = |start: u64, pages| group(5, start, pages).spans[0];
        let before = TouchSet { groups: vec![group(5, 100, 50)], ..TouchSet::default() };
        let mut touched = set(&[(5, 30), (10, 20), (500, 4)]);
        touched.groups[0].spans = vec![part(90, 12), part(140, 90)];
        let steady = steady(&before, &touched);
        assert_eq!(steady, [part(100, 2), part(140, 10)]);
        touched.steady = steady;
        let plan = Plan::new(&touched, Start::Early, &Dear(5));
        assert_eq!(plan.first, [part(100, 2)]);
        assert_eq!(Plan::first_of(&touched, Start::Early, &Dear(5)), plan.first);
        let then: Vec<u64> = plan.then.iter().map(|due| pages(&due.spans)).collect();
        assert_eq!(then, [10, 12 + 90 + 20, 4]);
        // A page alone, which is worth it: somebody has waited for it.
        touched.learn(&[part(7000, 1), part(8000, 7)]);
        let plan = Plan::new(&touched, Start::Early, &Dear(5));
        assert_eq!(plan.first, [part(7000, 1), part(100, 2)]);
        assert_eq!(plan.then[0].spans, [part(8000, 7), part(140, 10)]);
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
