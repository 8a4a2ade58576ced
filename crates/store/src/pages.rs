//! Which pages a checkpoint has, and where.
//!
//! Page runs travel as a history, with layouts between them. What is stored is the outcome: for
//! each owner the pages that count, and the ranges where whatever an older checkpoint had counts no
//! more. The same map gathers the epochs between two stored checkpoints, and folds a chain of
//! stored ones into one.

use std::collections::{BTreeMap, BTreeSet};

use hotspare_image::Checkpoint;
use hotspare_image::memory::{Mapping, MmId, PAGE_BYTES, PageOwner, SharedId};

use crate::extents::{Extents, Run};

/// What pages hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held<V> {
    /// Zeros, written by the guest.
    Zero,
    /// Bytes that are there.
    At(V),
}

impl<V: Run> Run for Held<V> {
    fn after(self, pages: u64) -> Self {
        match self {
            Held::Zero => Held::Zero,
            Held::At(place) => Held::At(place.after(pages)),
        }
    }
}

/// Pages of one owner.
#[derive(Clone, Debug, PartialEq)]
pub struct Owned<V> {
    /// Of what was before: this counts no more.
    pub gone: Extents<()>,
    /// What counts.
    pub pages: Extents<Held<V>>,
}

impl<V> Default for Owned<V> {
    fn default() -> Self {
        Self { gone: Extents::default(), pages: Extents::default() }
    }
}

/// Number of the first page that no address has.
const PAGES_END: u64 = u64::MAX / PAGE_BYTES + 1;

/// Some pages of one owner, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Whose.
    pub owner: PageOwner,
    /// Number of the first.
    pub first: u64,
    /// How many.
    pub pages: u64,
}

impl Part {
    fn of(owner: PageOwner, start: u64, end: u64) -> Self {
        let first = start / PAGE_BYTES;
        Self { owner, first, pages: end.div_ceil(PAGE_BYTES).saturating_sub(first) }
    }

    fn all(owner: PageOwner) -> Self {
        Self { owner, first: 0, pages: PAGES_END }
    }
}

/// The map. Whoever changes it says what to do with places that are of no more use.
#[derive(Clone, Debug, PartialEq)]
pub struct Pages<V>(pub BTreeMap<PageOwner, Owned<V>>);

impl<V> Default for Pages<V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

fn places<V>(free: &mut impl FnMut(u64, V)) -> impl FnMut(u64, Held<V>) {
    |pages, held| {
        if let Held::At(place) = held {
            free(pages, place);
        }
    }
}

impl<V: Run> Pages<V> {
    /// These pages hold this.
    pub fn put(&mut self, part: Part, held: Held<V>, free: &mut impl FnMut(u64, V)) {
        let owned = self.0.entry(part.owner).or_default();
        owned.pages.put(part.first, part.pages, held, &mut places(free));
    }

    /// These pages have nothing of their own.
    pub fn clear(&mut self, part: Part, free: &mut impl FnMut(u64, V)) {
        let owned = self.0.entry(part.owner).or_default();
        owned.pages.clear(part.first, part.pages, &mut places(free));
        owned.gone.put(part.first, part.pages, (), &mut |_, ()| {});
    }

    /// Only these owners are left.
    pub fn retain(&mut self, alive: &BTreeSet<PageOwner>, free: &mut impl FnMut(u64, V)) {
        for (_, owned) in self.0.extract_if(.., |owner, _| !alive.contains(owner)) {
            owned.pages.iter().for_each(|(_, pages, held)| places(free)(pages, held));
        }
    }

    /// What came after this.
    pub fn follow<W: Run>(&mut self, later: &Pages<W>, place: impl Fn(W) -> V) {
        let free = &mut |_, _| {};
        for (&owner, owned) in &later.0 {
            for (first, pages, ()) in owned.gone.iter() {
                self.clear(Part { owner, first, pages }, free);
            }
            for (first, pages, held) in owned.pages.iter() {
                let held = match held {
                    Held::Zero => Held::Zero,
                    Held::At(at) => Held::At(place(at)),
                };
                self.put(Part { owner, first, pages }, held, free);
            }
        }
    }

    /// How many pages have bytes.
    pub fn with_bytes(&self) -> u64 {
        let runs = self.0.values().flat_map(|owned| owned.pages.iter());
        runs.filter(|(_, _, held)| matches!(held, Held::At(_))).map(|(_, pages, _)| pages).sum()
    }
}

/// Who has pages in a checkpoint.
#[must_use]
pub fn owners(checkpoint: &Checkpoint) -> BTreeSet<PageOwner> {
    let spaces = checkpoint.spaces.iter().map(|space| PageOwner::Mm(space.id));
    spaces.chain(checkpoint.shared.iter().map(|object| PageOwner::Shared(object.id))).collect()
}

/// The layout of the last checkpoint, to tell what the next one loses by its own.
#[derive(Debug, Default)]
pub struct Layouts {
    spaces: BTreeMap<MmId, Vec<Mapping>>,
    shared: BTreeMap<SharedId, u64>,
}

impl Layouts {
    /// Goes on to `next`; the pages that this empties before its runs count. It is what the ghost
    /// does with its memory at the same moment. `None` if it empties a part of a page.
    pub fn step(&mut self, next: &Checkpoint) -> Option<Vec<Part>> {
        let mut lost = Vec::new();
        let mut torn = false;
        let mut spaces = BTreeMap::new();
        for space in &next.spaces {
            let owner = PageOwner::Mm(space.id);
            match self.spaces.get(&space.id) {
                Some(before) if !space.reset => {
                    let fresh = space.fresh.iter().map(|at| (at.start.0, at.end.0));
                    let pieces = replaced(before, &space.mappings).into_iter().chain(fresh);
                    lost.extend(pieces.map(|(start, end)| Part::of(owner, start, end)));
                }
                _ => lost.push(Part::all(owner)),
            }
            spaces.insert(space.id, space.mappings.clone());
        }
        let mut shared = BTreeMap::new();
        for object in &next.shared {
            let owner = PageOwner::Shared(object.id);
            match self.shared.get(&object.id) {
                Some(&before) if !object.reset => {
                    if object.bytes < before {
                        torn |= !object.bytes.is_multiple_of(PAGE_BYTES);
                        let end = before.next_multiple_of(PAGE_BYTES);
                        let start = object.bytes.next_multiple_of(PAGE_BYTES);
                        lost.push(Part::of(owner, start, end));
                    }
                }
                _ => lost.push(Part::all(owner)),
            }
            shared.insert(object.id, object.bytes);
        }
        (self.spaces, self.shared) = (spaces, shared);
        lost.retain(|part| part.pages > 0);
        (!torn).then_some(lost)
    }
}

/// Ranges of `before` that are not the same memory in `after`.
fn replaced(before: &[Mapping], after: &[Mapping]) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let mut rest = after.iter().peekable();
    for was in before {
        let (mut at, end) = (was.range.start.0, was.range.end.0);
        while at < end {
            while rest.next_if(|is| is.range.end.0 <= at).is_some() {}
            let next = rest.peek().filter(|is| is.range.start.0 < end);
            let Some(is) = next else {
                found.push((at, end));
                break;
            };
            if is.range.start.0 > at {
                found.push((at, is.range.start.0));
            }
            let (from, to) = (is.range.start.0.max(at), is.range.end.0.min(end));
            if !was.is_same_memory(is) {
                found.push((from, to));
            }
            at = to;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotspare_image::memory::{AddressSpace, Backing, GuestRange, SharedKind, SharedMemory};
    use hotspare_image::tree::HostPath;

    const SPACE: PageOwner = PageOwner::Mm(MmId(1));

    fn mapping(start: u64, end: u64, backing: Backing) -> Mapping {
        let range = GuestRange::new(start * PAGE_BYTES, end * PAGE_BYTES);
        Mapping { range, protection: 3, backing, flags: 0, protection_key: 0, name: None }
    }

    fn special() -> Backing {
        Backing::Special { name: "[vdso]".into() }
    }

    fn state(mappings: Vec<Mapping>, fresh: &[(u64, u64)], reset: bool) -> Checkpoint {
        let fresh = fresh.iter().map(|(a, b)| GuestRange::new(a * PAGE_BYTES, b * PAGE_BYTES));
        let space = AddressSpace {
            id: MmId(1),
            mappings,
            layout: Default::default(),
            exe: HostPath("/bin/x".into()),
            fresh: fresh.collect(),
            reset,
        };
        Checkpoint { spaces: vec![space], ..Checkpoint::default() }
    }

    fn parts(lost: &Option<Vec<Part>>) -> Vec<(u64, u64)> {
        let lost = lost.as_ref().expect("whole pages");
        lost.iter().map(|part| (part.first, part.first + part.pages)).collect()
    }

    #[test]
    fn a_layout_empties_what_is_unmapped_mapped_anew_or_another_kind() {
        let mut layouts = Layouts::default();
        let first = state(vec![mapping(10, 20, Backing::Anonymous)], &[], true);
        assert_eq!(parts(&layouts.step(&first)), [(0, PAGES_END)]);
        let again = state(vec![mapping(10, 30, Backing::Anonymous)], &[], false);
        assert_eq!(parts(&layouts.step(&again)), []);
        let torn = vec![
            mapping(10, 12, Backing::Anonymous),
            mapping(15, 16, special()),
            mapping(18, 30, Backing::Anonymous),
        ];
        let lost = layouts.step(&state(torn, &[(25, 26)], false));
        assert_eq!(parts(&lost), [(12, 15), (15, 16), (16, 18), (25, 26)]);
        let lost = layouts.step(&state(vec![mapping(1, 2, Backing::Anonymous)], &[], false));
        assert_eq!(parts(&lost), [(10, 12), (15, 16), (18, 30)]);
        let lost = layouts.step(&state(vec![mapping(1, 2, Backing::Anonymous)], &[], true));
        assert_eq!(parts(&lost), [(0, PAGES_END)]);
    }

    #[test]
    fn a_shared_object_that_shrinks_loses_its_end() {
        let object = |bytes, reset| Checkpoint {
            shared: vec![SharedMemory {
                id: SharedId(4),
                kind: SharedKind::Anonymous,
                bytes,
                reset,
            }],
            ..Checkpoint::default()
        };
        let mut layouts = Layouts::default();
        assert_eq!(parts(&layouts.step(&object(5 * PAGE_BYTES, true))), [(0, PAGES_END)]);
        assert_eq!(parts(&layouts.step(&object(2 * PAGE_BYTES, false))), [(2, 5)]);
        assert_eq!(parts(&layouts.step(&object(9 * PAGE_BYTES, false))), []);
        assert_eq!(parts(&layouts.step(&object(9 * PAGE_BYTES, true))), [(0, PAGES_END)]);
        assert_eq!(layouts.step(&object(9 * PAGE_BYTES - 1, false)), None);
    }

    #[test]
    fn what_follows_wins_and_what_is_gone_is_gone() {
        let none = &mut |_, _: u64| {};
        let mut base: Pages<u64> = Pages::default();
        let part = |first, pages| Part { owner: SPACE, first, pages };
        base.put(part(0, 100), Held::At(1000), none);
        let mut later: Pages<u64> = Pages::default();
        later.put(part(20, 1), Held::At(7), none);
        later.clear(part(10, 20), none);
        later.put(part(15, 1), Held::Zero, none);
        base.follow(&later, |at| at + 5000);
        let runs: Vec<_> = base.0[&SPACE].pages.iter().collect();
        assert_eq!(runs, [(0, 10, Held::At(1000)), (15, 1, Held::Zero), (30, 70, Held::At(1030))]);
    }
}
