//! Many indexes become one: those of a chain, each of which says what is new and what is gone.
//!
//! They are merged in pairs on all processors, as merge sort does: a page that changes in each of
//! 28 links is looked at five times, and no tree is changed for it.

use std::collections::BTreeMap;

use hotspare_image::memory::PageOwner;

use crate::extents::{Extents, Run};
use crate::manifest::{Manifest, PageRun, Place};
use crate::pages::{Held, Owned, Pages};

/// Neighbouring pages of which the same is known: what they hold, or, if nothing is given, that
/// what was there counts no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    first: u64,
    pages: u64,
    held: Option<Held<Place>>,
}

impl Piece {
    fn end(&self) -> u64 {
        self.first + self.pages
    }

    /// The part of it from page `from` on.
    fn from(self, from: u64) -> Self {
        let done = from - self.first;
        let held = self.held.map(|held| held.after(done));
        Self { first: from, pages: self.pages - done, held }
    }

    /// The part of it before page `end`.
    fn until(self, end: u64) -> Self {
        Self { pages: end.min(self.end()) - self.first, ..self }
    }
}

/// What one or several neighbouring links of a chain say: by owner, in order, nothing twice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layer(BTreeMap<PageOwner, Vec<Piece>>);

impl Layer {
    /// Of link number `link`.
    pub(crate) fn of(manifest: &Manifest, link: u32) -> Self {
        Self::in_order(manifest, link).unwrap_or_else(|| Self::whatever(manifest, link))
    }

    /// `None` if the manifest does not list its pages in order.
    fn in_order(manifest: &Manifest, link: u32) -> Option<Self> {
        let mut place = Place { link, page: 0 };
        let gone = pieces_of(manifest, &manifest.gone, |_| None)?;
        let runs = pieces_of(manifest, &manifest.runs, |run| {
            let at = place;
            place = place.after(if run.zero { 0 } else { run.pages });
            Some(if run.zero { Held::Zero } else { Held::At(at) })
        })?;
        Some(Self(gone).below(Self(runs)))
    }

    fn whatever(manifest: &Manifest, link: u32) -> Self {
        let each = manifest.pages(link).0.into_iter().map(|(owner, owned)| {
            let gone = owned.gone.iter();
            let gone = gone.map(|(first, pages, ())| Piece { first, pages, held: None });
            let held = owned.pages.iter();
            let held = held.map(|(first, pages, held)| Piece { first, pages, held: Some(held) });
            (owner, merge(gone.collect(), held.collect()))
        });
        Self(each.collect())
    }

    /// Both, where the later one counts.
    fn below(mut self, later: Self) -> Self {
        for (owner, over) in later.0 {
            let under = self.0.remove(&owner).unwrap_or_default();
            self.0.insert(owner, merge(under, over));
        }
        self
    }

    fn into_pages(self) -> Pages<Place> {
        let each = self.0.into_iter().map(|(owner, pieces)| {
            let held = pieces.into_iter().filter_map(|p| Some((p.first, p.pages, p.held?)));
            (owner, Owned { gone: Extents::default(), pages: Extents::of_sorted(held) })
        });
        Pages(each.filter(|(_, owned): &(_, Owned<_>)| !owned.pages.is_empty()).collect())
    }
}

/// What a chain has, given its links from the whole one on.
pub(crate) fn fold(layers: Vec<Layer>) -> Pages<Place> {
    folded(layers).into_pages()
}

fn folded(mut layers: Vec<Layer>) -> Layer {
    if layers.len() <= 1 {
        return layers.pop().unwrap_or_default();
    }
    let later = layers.split_off(layers.len() / 2);
    let (layer, later) = rayon::join(|| folded(layers), || folded(later));
    layer.below(later)
}

fn pieces_of(
    manifest: &Manifest,
    runs: &[PageRun],
    mut held: impl FnMut(&PageRun) -> Option<Held<Place>>,
) -> Option<BTreeMap<PageOwner, Vec<Piece>>> {
    let mut found: BTreeMap<PageOwner, Vec<Piece>> = BTreeMap::new();
    for same in runs.chunk_by(|a, b| a.owner == b.owner) {
        let pieces = found.entry(*manifest.owners.get(same[0].owner as usize)?).or_default();
        for run in same {
            if pieces.last().is_some_and(|last| last.end() > run.first) {
                return None;
            }
            pieces.push(Piece { first: run.first, pages: run.pages, held: held(run) });
        }
    }
    Some(found)
}

/// `over` counts where both have something.
fn merge(under: Vec<Piece>, over: Vec<Piece>) -> Vec<Piece> {
    if under.is_empty() {
        return over;
    }
    let mut merged = Vec::with_capacity(under.len() + over.len());
    let mut below = under.into_iter();
    let mut rest = below.next();
    for piece in over {
        // What begins before it stays, up to it; what reaches beyond it goes on behind it.
        while let Some(lower) = rest {
            if lower.first >= piece.end() {
                break;
            }
            if lower.first < piece.first {
                merged.push(lower.until(piece.first));
            }
            if lower.end() > piece.end() {
                rest = Some(lower.from(piece.end()));
                break;
            }
            rest = below.next();
        }
        merged.push(piece);
    }
    merged.extend(rest);
    merged.extend(below);
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotspare_image::memory::{MmId, SharedId};
    use proptest::prelude::*;

    const OWNERS: [PageOwner; 2] = [PageOwner::Mm(MmId(1)), PageOwner::Shared(SharedId(1))];

    fn runs(ordered: bool) -> impl Strategy<Value = Vec<PageRun>> {
        let run = (0u32..2, 0u64..60, 1u64..12, any::<bool>());
        let runs = prop::collection::vec(run, 0..12);
        runs.prop_map(move |mut runs| {
            if ordered {
                runs.sort_by_key(|run| (run.0, run.1));
            }
            let run = |(owner, first, pages, zero)| PageRun { owner, first, pages, zero };
            let mut runs: Vec<PageRun> = runs.into_iter().map(run).collect();
            if ordered {
                // Nothing twice.
                let mut ends = [0; 2];
                runs.retain(|run| {
                    let end = &mut ends[run.owner as usize];
                    let fits = run.first >= *end;
                    *end = if fits { run.first + run.pages } else { *end };
                    fits
                });
            }
            runs
        })
    }

    fn manifest(ordered: bool) -> impl Strategy<Value = Manifest> {
        (runs(ordered), runs(ordered)).prop_map(|(gone, runs)| {
            let owners = OWNERS.to_vec();
            Manifest { owners, gone, runs, ..Manifest::default() }
        })
    }

    fn held(pages: &Pages<Place>) -> Vec<(PageOwner, u64, Held<Place>)> {
        let each = pages.0.iter().flat_map(|(&owner, owned)| {
            let runs = owned.pages.iter();
            runs.flat_map(move |(first, pages, held)| {
                (0..pages).map(move |n| (owner, first + n, held.after(n)))
            })
        });
        each.collect()
    }

    proptest! {
        #[test]
        fn a_folded_chain_has_what_its_links_leave(
            links in prop::collection::vec(prop_oneof![manifest(true), manifest(false)], 1..9)
        ) {
            let mut plain: Pages<Place> = Pages::default();
            let mut layers = Vec::new();
            for (at, link) in (0..).zip(&links) {
                plain.follow(&link.pages(at), |place| place);
                layers.push(Layer::of(link, at));
            }
            let folded = fold(layers);
            prop_assert_eq!(held(&folded), held(&plain));
            let runs = |pages: &Pages<Place>| -> usize {
                pages.0.values().map(|owned| owned.pages.iter().count()).sum()
            };
            prop_assert_eq!(runs(&folded), runs(&plain), "neighbours join");
        }
    }
}
