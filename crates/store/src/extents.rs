//! A map from page numbers to values, by runs: neighbours whose values go on are one entry.

use std::collections::BTreeMap;

/// What a run has; each further page of it has the next one.
pub trait Run: Copy + PartialEq {
    /// What the page `pages` further on has.
    #[must_use]
    fn after(self, pages: u64) -> Self;
}

impl Run for () {
    fn after(self, _: u64) {}
}

/// The map.
#[derive(Clone, Debug, PartialEq)]
pub struct Extents<V>(BTreeMap<u64, (u64, V)>);

impl<V> Default for Extents<V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<V: Run> Extents<V> {
    /// Of runs that are in order, none over another: first page, pages, value of the first.
    #[must_use]
    pub fn of_sorted(runs: impl Iterator<Item = (u64, u64, V)>) -> Self {
        let mut joined: Vec<(u64, (u64, V))> = Vec::new();
        for (first, pages, value) in runs {
            match joined.last_mut() {
                Some((start, (length, had)))
                    if *start + *length == first && had.after(*length) == value =>
                {
                    *length += pages;
                }
                _ => joined.push((first, (pages, value))),
            }
        }
        Self(joined.into_iter().collect())
    }

    /// Gives pages a value, whatever they had; `lost` is told of each run that had another.
    pub fn put(&mut self, first: u64, pages: u64, value: V, lost: &mut impl FnMut(u64, V)) {
        if pages == 0 {
            return;
        }
        self.clear(first, pages, lost);
        let (mut start, mut length, mut value) = (first, pages, value);
        if let Some((&before, &(long, had))) = self.0.range(..first).next_back()
            && before + long == first
            && had.after(long) == value
        {
            (start, length, value) = (before, length + long, had);
        }
        if let Some(&(long, had)) = self.0.get(&(first + pages))
            && value.after(length) == had
        {
            self.0.remove(&(first + pages));
            length += long;
        }
        self.0.insert(start, (length, value));
    }

    /// Takes pages out; `lost` is told of each run that had a value: its length, and the value of
    /// its first page.
    pub fn clear(&mut self, first: u64, pages: u64, lost: &mut impl FnMut(u64, V)) {
        let end = first.saturating_add(pages);
        if let Some((&start, &(length, value))) = self.0.range(..first).next_back()
            && start + length > first
        {
            self.0.insert(start, (first - start, value));
            let rest = start + length - first;
            self.0.insert(first, (rest, value.after(first - start)));
        }
        while let Some((&start, &(length, value))) = self.0.range(first..end).next() {
            self.0.remove(&start);
            let inside = length.min(end - start);
            if inside < length {
                self.0.insert(end, (length - inside, value.after(inside)));
            }
            lost(inside, value);
        }
    }

    /// All runs in order: first page, pages, value of the first.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64, V)> {
        self.0.iter().map(|(&start, &(length, value))| (start, length, value))
    }

    /// The runs of `pages` pages from `first` on, cut to these, with the holes between them: first
    /// page, pages, value of the first.
    pub fn cover(&self, first: u64, pages: u64, mut each: impl FnMut(u64, u64, Option<V>)) {
        let end = first.saturating_add(pages);
        let mut at = first;
        let before = self.0.range(..first).next_back();
        for (&start, &(length, value)) in before.into_iter().chain(self.0.range(first..end)) {
            let (from, to) = (start.max(first), (start + length).min(end));
            if from >= to {
                continue;
            }
            if at < from {
                each(at, from - at, None);
            }
            each(from, to - from, Some(value.after(from - start)));
            at = to;
        }
        if at < end {
            each(at, end - at, None);
        }
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Pages that have a value.
    pub fn pages(&self) -> u64 {
        self.0.values().map(|(length, _)| length).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Run for u64 {
        fn after(self, pages: u64) -> u64 {
            self + pages
        }
    }

    proptest! {
        #[test]
        fn runs_are_what_single_pages_would_be(
            steps in prop::collection::vec(
                (0u64..60, 1u64..20, prop::option::of(0u64..1000)),
                1..60,
            )
        ) {
            let mut runs = Extents::default();
            let mut plain = BTreeMap::new();
            for (first, pages, value) in steps {
                let mut lost = Vec::new();
                let mut note = |pages: u64, from: u64| lost.extend(from..from + pages);
                match value {
                    Some(value) => runs.put(first, pages, value, &mut note),
                    None => runs.clear(first, pages, &mut note),
                }
                let mut gone: Vec<u64> =
                    (first..first + pages).filter_map(|page| plain.remove(&page)).collect();
                if let Some(value) = value {
                    plain.extend((0..pages).map(|page| (first + page, value + page)));
                }
                lost.sort_unstable();
                gone.sort_unstable();
                prop_assert_eq!(lost, gone);
                let each =
                    |(start, length, value)| (0..length).map(move |n| (start + n, value + n));
                let all: BTreeMap<_, _> = runs.iter().flat_map(each).collect();
                prop_assert_eq!(&all, &plain);
                let mut covered = Vec::new();
                runs.cover(10, 30, |first, pages, value| covered.push((first, pages, value)));
                prop_assert_eq!(covered.iter().map(|(_, pages, _)| pages).sum::<u64>(), 30);
                for (start, pages, value) in covered {
                    for page in 0..pages {
                        let there = plain.get(&(start + page)).copied();
                        prop_assert_eq!(there, value.map(|v| v + page));
                    }
                }
                let ends: Vec<_> = runs.iter().collect();
                let joined = ends
                    .windows(2)
                    .all(|two| two[0].0 + two[0].1 < two[1].0 || two[0].2 + two[0].1 != two[1].2);
                prop_assert!(joined);
            }
        }
    }
}
