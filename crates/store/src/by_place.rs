//! The pages of a checkpoint by where they are stored.

use hotspare_image::memory::{PAGE_BYTES, PageOwner};
use hotspare_image::source::Span;

use crate::chain::BlockId;
use crate::manifest::{BLOCK_PAGES, Place};
use crate::pages::{Held, Pages};

/// Longest span that [`ByPlace::in_order`] gives.
const SPAN_PAGES: u64 = 256;

/// Pages that lie one behind the other, in the store and in memory.
#[derive(Clone, Copy, Debug)]
struct Stored {
    /// Number of the first among the pages in blocks.
    page: u64,
    span: Span,
}

impl Stored {
    fn end(&self) -> u64 {
        self.page + self.span.pages
    }

    /// Those of it from page `from` on and before page `to`.
    fn part(&self, from: u64, to: u64) -> Span {
        let first = from.max(self.page);
        let start = self.span.start + (first - self.page) * PAGE_BYTES;
        Span { start, pages: to.min(self.end()) - first, ..self.span }
    }
}

/// All that count, each once.
#[derive(Debug, Default)]
pub(crate) struct ByPlace {
    /// Of each link of the chain, in the order in which they are stored.
    links: Vec<Vec<Stored>>,
    zeroes: Vec<Span>,
}

impl ByPlace {
    pub(crate) fn of(pages: &Pages<Place>) -> Self {
        let mut by_place = Self::default();
        for (&owner, owned) in &pages.0 {
            for (first, pages, held) in owned.pages.iter() {
                by_place.add(owner, first, pages, held);
            }
        }
        for link in &mut by_place.links {
            // Links list their pages in order, most often.
            if !link.is_sorted_by_key(|stored| stored.page) {
                link.sort_unstable_by_key(|stored| stored.page);
            }
        }
        by_place
    }

    fn add(&mut self, owner: PageOwner, first: u64, pages: u64, held: Held<Place>) {
        let span = Span { owner, start: first * PAGE_BYTES, pages };
        match held {
            Held::Zero => self.zeroes.push(span),
            Held::At(Place { link, page }) => {
                let link = link as usize;
                if self.links.len() <= link {
                    self.links.resize_with(link + 1, Vec::new);
                }
                self.links[link].push(Stored { page, span });
            }
        }
    }

    /// The pages that a block has, as far as they count.
    pub(crate) fn of_block(&self, (link, block): BlockId) -> impl Iterator<Item = Span> {
        let (start, end) = (block as u64 * BLOCK_PAGES, (block as u64 + 1) * BLOCK_PAGES);
        let link = self.links.get(link as usize).map(Vec::as_slice).unwrap_or_default();
        let rest = &link[link.partition_point(|stored| stored.end() <= start)..];
        let inside = rest.iter().take_while(move |stored| stored.page < end);
        inside.map(move |stored| stored.part(start, end))
    }

    /// All of them in the order in which they are stored, cut where blocks begin, so that none is
    /// read twice.
    pub(crate) fn in_order(&self) -> Vec<Span> {
        let mut spans = Vec::new();
        let zeroes = self.zeroes.iter().map(|&span| Stored { page: 0, span });
        for stored in zeroes.chain(self.links.iter().flatten().copied()) {
            let mut from = stored.page;
            while from < stored.end() {
                let to = from - from % BLOCK_PAGES + SPAN_PAGES;
                spans.push(stored.part(from, to));
                from = to;
            }
        }
        spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::Part;
    use hotspare_image::memory::MmId;
    use proptest::prelude::*;

    const OWNERS: [PageOwner; 2] = [PageOwner::Mm(MmId(1)), PageOwner::Mm(MmId(2))];

    /// Runs of pages, not in the order in which they are stored; some are written over.
    fn pages() -> impl Strategy<Value = Pages<Place>> {
        let run = (0usize..2, 0u64..2000, 1u64..600, 0u32..3, any::<bool>());
        prop::collection::vec(run, 0..20).prop_map(|runs| {
            let (mut pages, mut next) = (Pages::default(), [0; 3]);
            for (owner, first, count, link, zero) in runs {
                let place = Place { link, page: next[link as usize] };
                next[link as usize] += if zero { 0 } else { count };
                let held = if zero { Held::Zero } else { Held::At(place) };
                let part = Part { owner: OWNERS[owner], first, pages: count };
                pages.put(part, held, &mut |_, _| {});
            }
            pages
        })
    }

    /// Page by page: whose, which, and what it holds.
    fn each(pages: &Pages<Place>) -> Vec<(PageOwner, u64, Held<Place>)> {
        let owned = pages.0.iter();
        let runs =
            owned.flat_map(|(&owner, owned)| owned.pages.iter().map(move |run| (owner, run)));
        runs.flat_map(|(owner, (first, pages, held))| {
            (0..pages).map(move |n| (owner, first + n, crate::extents::Run::after(held, n)))
        })
        .collect()
    }

    fn singles(spans: impl Iterator<Item = Span>) -> Vec<(PageOwner, u64)> {
        let pages = |span: Span| (0..span.pages).map(move |n| (span, n));
        spans.flat_map(pages).map(|(span, n)| (span.owner, span.start / PAGE_BYTES + n)).collect()
    }

    proptest! {
        #[test]
        fn a_block_has_the_pages_that_say_so_and_all_come_in_order(pages in pages()) {
            let by_place = ByPlace::of(&pages);
            let mut plain = each(&pages);
            plain.sort_by_key(|&(owner, page, held)| match held {
                Held::Zero => (None, owner, page),
                Held::At(place) => (Some(place), owner, page),
            });
            let in_order = by_place.in_order();
            let all = singles(in_order.iter().copied());
            prop_assert_eq!(all, plain.iter().map(|one| (one.0, one.1)).collect::<Vec<_>>());
            prop_assert!(in_order.iter().all(|span| span.pages <= SPAN_PAGES));
            for (link, block) in (0..3).flat_map(|link| (0..30).map(move |block| (link, block))) {
                let has = plain.iter().filter(|one| matches!(one.2, Held::At(place)
                    if (place.link, place.page / BLOCK_PAGES) == (link, block)));
                let has: Vec<_> = has.map(|one| (one.0, one.1)).collect();
                let of_block = by_place.of_block((link, block as usize));
                prop_assert_eq!(singles(of_block), has);
            }
        }
    }
}
