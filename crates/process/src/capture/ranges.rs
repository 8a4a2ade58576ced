//! Sets of addresses as sorted, disjoint, non-touching ranges.

use hotspare_kernel::memory::Span;

/// A set of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<(u64, u64)>);

/// The union of arbitrary ranges.
pub fn merge_sorted(mut ranges: Vec<(u64, u64)>) -> Ranges {
    ranges.sort_unstable();
    let mut merged = Ranges::default();
    for (start, end) in ranges {
        merged.push(start, end);
    }
    merged
}

impl Ranges {
    /// Adds a range that starts no lower than the last one did.
    pub fn push(&mut self, start: u64, end: u64) {
        debug_assert!(self.0.last().is_none_or(|last| last.0 <= start), "pushed out of order");
        match self.0.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => self.0.push((start, end)),
        }
    }

    /// The same, and closes a gap of up to `gap` before it.
    pub fn push_near(&mut self, start: u64, end: u64, gap: u64) {
        match self.0.last_mut() {
            Some(last) if start <= last.1.saturating_add(gap) => last.1 = last.1.max(end),
            _ => self.0.push((start, end)),
        }
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of ranges.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether all of `other` is in this set. Fast if that is small.
    pub fn holds(&self, other: &Self) -> bool {
        other.0.iter().all(|&(start, end)| {
            let at = self.0.partition_point(|range| range.1 <= start);
            self.0.get(at).is_some_and(|range| range.0 <= start && end <= range.1)
        })
    }

    /// Addresses in both sets. Fast if `other` is small.
    pub fn common(&self, other: &Self) -> Self {
        let mut common = Self::default();
        for &(start, end) in &other.0 {
            for (from, bytes) in self.within(start, end) {
                common.push(from, from + bytes as u64);
            }
        }
        common
    }

    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// The ranges in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().copied()
    }

    /// Addresses in either set.
    pub fn with(&self, other: &Self) -> Self {
        if self.0.is_empty() {
            return other.clone();
        }
        let (mut a, mut b) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut all = Self::default();
        loop {
            let next = match (a.peek(), b.peek()) {
                (Some(x), Some(y)) if x.0 <= y.0 => a.next(),
                (_, Some(_)) => b.next(),
                (Some(_), None) => a.next(),
                (None, None) => return all,
            };
            if let Some(&(start, end)) = next {
                all.push(start, end);
            }
        }
    }

    /// Addresses in this set and not in `other`.
    pub fn without(&self, other: &Self) -> Self {
        let mut left = Self::default();
        let mut holes = other.0.iter().peekable();
        for &(start, end) in &self.0 {
            let mut at = start;
            while let Some(&&(from, to)) = holes.peek() {
                if from >= end {
                    break;
                }
                if from > at {
                    left.push(at, from);
                }
                at = at.max(to);
                if to > end {
                    break;
                }
                holes.next();
            }
            if at < end {
                left.push(at, end);
            }
        }
        left
    }

    /// Removes up to `bytes_max` bytes from the front and returns them as spans.
    pub fn take(&mut self, bytes_max: u64) -> Vec<Span> {
        let mut spans = Vec::new();
        let mut left = bytes_max;
        let mut whole = 0;
        for range in &mut self.0 {
            let bytes = (range.1 - range.0).min(left);
            if bytes == 0 {
                break;
            }
            spans.push((range.0, bytes as usize));
            left -= bytes;
            range.0 += bytes;
            if range.0 < range.1 {
                break;
            }
            whole += 1;
        }
        self.0.drain(..whole);
        spans
    }

    /// The parts of `[start, end)` in this set, as spans.
    pub fn within(&self, start: u64, end: u64) -> Vec<Span> {
        let first = self.0.partition_point(|range| range.1 <= start);
        self.0[first..]
            .iter()
            .take_while(|range| range.0 < end)
            .map(|range| {
                let from = range.0.max(start);
                (from, (range.1.min(end) - from) as usize)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn members(ranges: &Ranges) -> std::collections::BTreeSet<u64> {
        ranges.iter().flat_map(|(start, end)| start..end).collect()
    }

    proptest! {
        #[test]
        fn ranges_behave_like_sets(
            a in prop::collection::vec((0u64..200, 1u64..20), 0..12),
            b in prop::collection::vec((0u64..200, 1u64..20), 0..12),
            bytes in 0u64..100,
        ) {
            let ends = |v: Vec<(u64, u64)>| v.into_iter().map(|(s, l)| (s, s + l)).collect();
            let (a, b) = (merge_sorted(ends(a)), merge_sorted(ends(b)));
            let (x, y) = (members(&a), members(&b));
            prop_assert_eq!(members(&a.with(&b)), x.union(&y).copied().collect());
            prop_assert_eq!(members(&a.without(&b)), x.difference(&y).copied().collect());
            prop_assert_eq!(members(&a.common(&b)), x.intersection(&y).copied().collect());
            prop_assert_eq!(a.holds(&b), y.is_subset(&x));
            let mut rest = a.clone();
            let taken = rest.take(bytes);
            let taken: u64 = taken.iter().map(|span| span.1 as u64).sum();
            prop_assert_eq!(taken, bytes.min(a.bytes()));
            prop_assert_eq!(rest.bytes(), a.bytes() - taken);
        }
    }
}
