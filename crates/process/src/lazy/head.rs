//! Decides when a guest may start before its memory is there.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use hotspare_image::memory::PAGE_BYTES;
use hotspare_image::source::Span;

use super::plan::Due;

/// What is judged piece by piece: a long span is not nothing until its last page is there.
const PIECE_PAGES: u64 = 128;
/// Arrivals that the line is judged by.
const ARRIVALS: usize = 16;
/// Fewer say nothing.
const ARRIVALS_MIN: usize = 4;
/// Of the measured bandwidth this much, in percent, is counted on.
const TRUST: u64 = 75;

/// Bytes a second, of the last arrivals.
#[derive(Debug, Default)]
pub(crate) struct Rate {
    arrivals: VecDeque<(Instant, u64)>,
    bytes: u64,
}

impl Rate {
    /// So many bytes have come.
    pub(crate) fn came(&mut self, bytes: u64, now: Instant) {
        self.bytes += bytes;
        self.arrivals.push_back((now, self.bytes));
        if self.arrivals.len() > ARRIVALS {
            self.arrivals.pop_front();
        }
    }

    /// None as long as too little has come.
    pub(crate) fn bytes_per_second(&self) -> Option<u64> {
        let (Some(first), Some(last)) = (self.arrivals.front(), self.arrivals.back()) else {
            return None;
        };
        // What came with the first arrival was under way before it.
        let micros = (last.0 - first.0).as_micros().max(1);
        let bytes = u128::from(last.1 - first.1);
        let rate = (bytes * 1_000_000 / micros).min(u64::MAX.into()) as u64;
        (self.arrivals.len() >= ARRIVALS_MIN).then_some(rate)
    }
}

/// What must be there, or on its way, when the guest starts.
#[derive(Debug, Default)]
pub(crate) struct Head {
    /// What has not come, in order; what has come behind the first of them is still here.
    left: VecDeque<Span>,
    /// By when how much of it must be there, counted from the beginning.
    dues: VecDeque<(u64, Duration)>,
    /// What is not here any more.
    came: u64,
    rate: Rate,
}

impl Head {
    /// `first` is wanted at once, `then` when it is due; what may wait is no concern.
    pub(crate) fn new(first: &[Span], then: &[Due]) -> Self {
        let mut head = Self::default();
        let mut bytes = 0;
        let judged = then.iter().filter_map(|due| Some((due.after?, &due.spans[..])));
        for (after, spans) in [(Duration::ZERO, first)].into_iter().chain(judged) {
            for span in spans {
                let mut rest = *span;
                while rest.pages > 0 {
                    let pages = rest.pages.min(PIECE_PAGES);
                    head.left.push_back(Span { pages, ..rest });
                    rest.start += pages * PAGE_BYTES;
                    rest.pages -= pages;
                }
                bytes += span.pages * PAGE_BYTES;
            }
            head.dues.push_back((bytes, after));
        }
        head
    }

    /// So many bytes have come, of whatever.
    pub(crate) fn came(&mut self, bytes: u64, now: Instant) {
        self.rate.came(bytes, now);
    }

    /// Whether what is wanted at once is there. `is_there` tells whether a span has come.
    pub(crate) fn has_first(&mut self, is_there: impl Fn(&Span) -> bool) -> bool {
        while let Some(span) = self.left.front().filter(|span| is_there(span)) {
            self.came += span.pages * PAGE_BYTES;
            self.left.pop_front();
        }
        while self.dues.front().is_some_and(|due| due.0 <= self.came) {
            self.dues.pop_front();
        }
        self.dues.front().is_none_or(|due| !due.1.is_zero())
    }

    /// Whether the guest may start.
    pub(crate) fn may_start(&mut self, is_there: impl Fn(&Span) -> bool) -> bool {
        if !self.has_first(is_there) {
            return false;
        }
        if self.dues.is_empty() {
            return true;
        }
        let Some(rate) = self.rate.bytes_per_second() else { return false };
        let rate = u128::from(rate) * u128::from(TRUST) / 100;
        self.dues.iter().all(|&(bytes, after)| {
            let wanted = u128::from(bytes - self.came) * 1_000_000;
            wanted <= rate * after.as_micros()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotspare_image::memory::{MmId, PageOwner};
    use proptest::prelude::*;

    fn span(start: u64, pages: u64) -> Span {
        Span { owner: PageOwner::Mm(MmId(1)), start: start * PAGE_BYTES, pages }
    }

    fn due(ms: u64, start: u64, pages: u64) -> Due {
        Due { after: Some(Duration::from_millis(ms)), spans: vec![span(start, pages)] }
    }

    /// A line of so many pages each millisecond, `pages` at a time.
    fn feed(head: &mut Head, times: u32, pages: u64, per_ms: u64) {
        let began = Instant::now();
        for n in 0..times {
            let at = u64::from(n) * pages * 1000 / per_ms;
            head.came(pages * PAGE_BYTES, began + Duration::from_micros(at));
        }
    }

    #[test]
    fn nothing_foreseen_is_a_start_at_once() {
        assert!(Head::new(&[], &[]).may_start(|_| false));
        let whenever = Due { after: None, spans: vec![span(0, 9)] };
        assert!(Head::new(&[], &[whenever]).may_start(|_| false));
    }

    #[test]
    fn what_is_first_is_waited_for() {
        let mut head = Head::new(&[span(0, 300)], &[]);
        assert!(!head.may_start(|_| false));
        assert!(!head.may_start(|span| span.start == 0));
        assert!(head.may_start(|_| true));
    }

    #[test]
    fn a_guest_does_not_start_before_the_line_is_known() {
        let mut head = Head::new(&[], &[due(1000, 0, 10)]);
        assert!(!head.may_start(|_| false));
        feed(&mut head, 2, 1, 1);
        assert!(!head.may_start(|_| false), "two arrivals say little");
        feed(&mut head, 8, 1, 1);
        assert!(head.may_start(|_| false), "10 pages in a second, of a line that has 1000");
    }

    #[test]
    fn a_slow_line_is_waited_for_until_the_rest_will_be_in_time() {
        // 1000 pages in the second after the start; the line brings 1 page each millisecond, and
        // three quarters of that are counted on.
        let mut head = Head::new(&[], &[due(1000, 0, 1000)]);
        feed(&mut head, 16, 1, 1);
        assert!(!head.may_start(|_| false));
        assert!(!head.may_start(|span| span.end() <= 128 * PAGE_BYTES));
        assert!(head.may_start(|span| span.end() <= 256 * PAGE_BYTES));
    }

    proptest! {
        /// At the measured rate, everything is there when it is first wanted.
        #[test]
        fn nothing_comes_later_than_it_was_touched(
            parts in prop::collection::vec((1u64..500, 0u64..2000), 1..10),
            per_ms in 1u64..64,
            there in 0usize..100,
        ) {
            let (mut until, mut start) = (0, 0);
            let dues: Vec<Due> = parts.iter().map(|&(ms, pages)| {
                let due = due(until, start, pages);
                (until, start) = (until + ms, start + pages);
                due
            }).collect();
            let mut head = Head::new(&[], &dues);
            feed(&mut head, 16, per_ms, per_ms);
            let left = head.left.iter().copied().skip(there).collect::<Vec<_>>();
            if head.may_start(|span| !left.contains(span)) {
                let mut waits = 0;
                for (due, &(_, pages)) in dues.iter().zip(&parts) {
                    let came = due.spans[0].pages - left.iter()
                        .filter(|s| due.spans[0].start <= s.start && s.end() <= due.spans[0].end())
                        .map(|s| s.pages).sum::<u64>();
                    waits += pages - came;
                    let ms = due.after.unwrap_or_default().as_millis() as u64;
                    prop_assert!(waits <= per_ms * ms, "{waits} pages within {ms} ms");
                }
            } else {
                prop_assert!(!left.is_empty());
            }
        }
    }
}
