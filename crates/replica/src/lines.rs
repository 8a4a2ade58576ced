//! Which parts of a page have changed since it was last sent, known by their hashes.
//!
//! A program that writes to a page mostly writes to little of it. What was sent of a page is what
//! the ghost has of it, until it is discarded, so the changed lines are enough. Hashes of the lines
//! are a sixteenth of their bytes, so many pages can be known; two contents with one hash (64 bits,
//! with a seed that no guest knows) would be a page that is wrong on the spare: at a million
//! changed lines a second that is to be expected once in half a million years.

use std::hash::{BuildHasher, Hasher, RandomState};

use hotspare_image::memory::PageOwner;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::bases::{PAGE, PageName, Recent};

/// Bytes of a line.
pub const LINE: usize = 128;
/// Lines of a page; a bit each in 32.
pub const LINES: usize = PAGE / LINE;
/// Pages of which lines are known: 16 MiB of hashes, for 256 MiB.
const PAGES_MAX: usize = 65_536;
/// With more changed lines a page travels whole.
const CHANGED_MAX: u32 = LINES as u32 / 2;

/// Hashes of the lines of pages as they were sent last.
pub(crate) struct LineSums {
    seed: u64,
    sums: Recent<[u64; LINES]>,
}

impl Default for LineSums {
    fn default() -> Self {
        let seed = RandomState::new().build_hasher().finish();
        LineSums { seed, sums: Recent::with_limit(PAGES_MAX, [0; LINES]) }
    }
}

impl LineSums {
    /// The lines of `page` that are not as they were sent last, a bit each, if they are few. `None`
    /// where it must be sent whole. Either way it counts as sent.
    pub(crate) fn changed(&mut self, name: PageName, page: &[u8]) -> Option<u32> {
        // Of a shared object the spare may have passed over what lay behind its end for a moment.
        let PageOwner::Mm(_) = name.0 else { return None };
        let (sums, known) = self.sums.note(name);
        let mut changed = 0;
        for (line, (sum, bytes)) in sums.iter_mut().zip(page.as_chunks::<LINE>().0).enumerate() {
            let now = xxh3_64_with_seed(bytes, self.seed);
            changed |= u32::from(*sum != now) << line;
            *sum = now;
        }
        (known && changed.count_ones() <= CHANGED_MAX).then_some(changed)
    }

    /// What the spare has of these pages is not known.
    pub(crate) fn forget(&mut self, owner: PageOwner, first: u64, pages: u64) {
        self.sums.forget(owner, first, pages);
    }

    /// What the spare has is not known.
    pub(crate) fn clear(&mut self) {
        self.sums.clear();
    }
}

/// Appends the body: which lines, and their bytes.
pub(crate) fn put_lines(changed: u32, page: &[u8], into: &mut Vec<u8>) {
    into.extend_from_slice(&changed.to_le_bytes());
    for (line, bytes) in page.as_chunks::<LINE>().0.iter().enumerate() {
        if changed >> line & 1 != 0 {
            into.extend_from_slice(bytes);
        }
    }
}

/// Where changed lines lie in the page, in bytes, neighbours together.
pub(crate) fn stretches(changed: u32) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut rest = changed;
    std::iter::from_fn(move || {
        let start = (rest != 0).then(|| rest.trailing_zeros())?;
        let length = (!(rest >> start)).trailing_zeros();
        let ones = (u64::from(u32::MAX) >> (32 - length)) as u32;
        rest &= !(ones << start);
        let (start, length) = (start as usize * LINE, length as usize * LINE);
        Some(start..start + length)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotspare_image::memory::{MmId, SharedId};

    #[test]
    fn stretches_are_where_the_bits_are() {
        for changed in [0, 1, 1 << 31, u32::MAX, 0b1011_0000_0001, 0xffff_0000, 0x8000_0001] {
            let mut seen = 0u32;
            let mut end = 0;
            for stretch in stretches(changed) {
                assert!(stretch.start > end || (stretch.start, end) == (0, 0), "{changed:#x}");
                end = stretch.end;
                (stretch.start / LINE..end / LINE).for_each(|line| seen |= 1 << line);
            }
            assert_eq!(seen, changed);
        }
    }

    #[test]
    fn few_changed_lines_are_told_and_many_are_not() {
        let mut sums = LineSums::default();
        let name = (PageOwner::Mm(MmId(1)), 0x1000);
        let mut page = vec![7u8; PAGE];
        assert_eq!(sums.changed(name, &page), None);
        assert_eq!(sums.changed(name, &page), Some(0));
        (page[0], page[PAGE - 1]) = (8, 8);
        assert_eq!(sums.changed(name, &page), Some(1 | 1 << 31));
        page.fill(1);
        assert_eq!(sums.changed(name, &page), None);
        assert_eq!(sums.changed(name, &page), Some(0));
        sums.forget(name.0, 0, 2);
        assert_eq!(sums.changed(name, &page), None);
        sums.clear();
        assert_eq!(sums.changed(name, &page), None);
        let shared = (PageOwner::Shared(SharedId(1)), 0x1000);
        assert_eq!((sums.changed(shared, &page), sums.changed(shared, &page)), (None, None));
    }
}
