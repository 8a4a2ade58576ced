//! Which pages of an address space are still to come, and from where in the checkpoint.
//!
//! A page is asked for by where it was in the checkpoint, and put in where it is now: mremap(2)
//! moves what has not come yet as well.

use std::collections::BTreeMap;

/// Pieces by the address where they are now: length, and the first byte in the checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    pieces: BTreeMap<u64, (u64, u64)>,
    /// Where each piece is now, by its first byte in the checkpoint.
    places: BTreeMap<u64, u64>,
    bytes: u64,
}

/// Some bytes that are still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where they are now.
    pub at: u64,
    /// How many.
    pub bytes: u64,
    /// Where they are in the checkpoint.
    pub source: u64,
}

impl Pending {
    /// Adds what lies where it lay in the checkpoint; nothing may be pending there.
    pub fn add(&mut self, start: u64, end: u64) {
        self.insert(Piece { at: start, bytes: end - start, source: start });
    }

    fn insert(&mut self, piece: Piece) {
        let Piece { mut at, mut bytes, mut source } = piece;
        self.bytes += bytes;
        if let Some((&before, &(length, from))) = self.pieces.range(..at).next_back()
            && before + length == at
            && from + length == source
        {
            self.take(before);
            (at, bytes, source) = (before, bytes + length, from);
        }
        if let Some(&(length, from)) = self.pieces.get(&(at + bytes))
            && source + bytes == from
        {
            self.take(at + bytes);
            bytes += length;
        }
        self.place(at, bytes, source);
    }

    fn place(&mut self, at: u64, bytes: u64, source: u64) {
        self.pieces.insert(at, (bytes, source));
        self.places.insert(source, at);
    }

    fn take(&mut self, at: u64) -> Option<(u64, u64)> {
        let taken = self.pieces.remove(&at)?;
        self.places.remove(&taken.1);
        Some(taken)
    }

    /// Whether everything has come.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// How much is still to come.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All pieces, by address.
    pub fn iter(&self) -> impl Iterator<Item = Piece> + '_ {
        self.pieces.iter().map(|(&at, &(bytes, source))| Piece { at, bytes, source })
    }

    /// What is pending of `[start, end)`.
    pub fn within(&self, start: u64, end: u64) -> Vec<Piece> {
        let first = self.pieces.range(..=start).next_back().map_or(start, |(&at, _)| at);
        let pieces = self.pieces.range(first..end.max(first));
        pieces.filter_map(|(&at, &(bytes, source))| cut(at, bytes, source, start, end)).collect()
    }

    /// What is pending of the checkpoint's `[start, end)`.
    pub fn of_source(&self, start: u64, end: u64) -> Vec<Piece> {
        let first = self.places.range(..=start).next_back().map_or(start, |(&source, _)| source);
        let places = self.places.range(first..end.max(first));
        let cut = |(&source, at): (&u64, &u64)| {
            let (bytes, _) = self.pieces.get(at)?;
            let piece = cut(source, *bytes, *at, start, end)?;
            Some(Piece { at: piece.source, bytes: piece.bytes, source: piece.at })
        };
        places.filter_map(cut).collect()
    }

    /// Nothing of `[start, end)` is to come any more.
    pub fn remove(&mut self, start: u64, end: u64) -> Vec<Piece> {
        let removed = self.within(start, end);
        for piece in &removed {
            let whole = self.pieces.range(..=piece.at).next_back().map(|(&at, _)| at);
            let Some(at) = whole else { continue };
            let Some((bytes, source)) = self.take(at) else { continue };
            if at < piece.at {
                self.place(at, piece.at - at, source);
            }
            let (end, rest) = (at + bytes, piece.at + piece.bytes);
            if rest < end {
                self.place(rest, end - rest, source + (rest - at));
            }
            self.bytes -= piece.bytes;
        }
        removed
    }

    /// These bytes have moved.
    pub fn shift(&mut self, from: u64, to: u64, bytes: u64) {
        let moved = self.remove(from, from.saturating_add(bytes));
        self.remove(to, to.saturating_add(bytes));
        for piece in moved {
            self.insert(Piece { at: to + (piece.at - from), ..piece });
        }
    }
}

/// The part of a piece in `[start, end)`.
fn cut(at: u64, bytes: u64, source: u64, start: u64, end: u64) -> Option<Piece> {
    let (from, to) = (at.max(start), (at + bytes).min(end));
    (from < to).then(|| Piece { at: from, bytes: to - from, source: source + (from - at) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Source of each pending page, by its place.
    type Model = BTreeMap<u64, u64>;

    fn model_of(pending: &Pending) -> Model {
        pending.iter().flat_map(|p| (0..p.bytes).map(move |i| (p.at + i, p.source + i))).collect()
    }

    #[derive(Clone, Debug)]
    enum Step {
        Remove(u64, u64),
        Shift(u64, u64, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0u64..120, 1u64..30).prop_map(|(at, bytes)| Step::Remove(at, at + bytes)),
            (0u64..60, 0u64..60, 1u64..30).prop_map(|(from, to, bytes)| {
                // mremap(2) refuses places that overlap.
                let to = if to < from + bytes && from < to + bytes { from + bytes } else { to };
                Step::Shift(from, to, bytes)
            }),
        ]
    }

    proptest! {
        #[test]
        fn pending_pages_are_those_of_a_plain_map(
            steps in prop::collection::vec(step(), 0..20),
            look in (0u64..120, 1u64..40),
        ) {
            let mut pending = Pending::default();
            pending.add(0, 20);
            pending.add(40, 70);
            pending.add(70, 75);
            let mut model = model_of(&pending);
            for step in steps {
                match step {
                    Step::Remove(start, end) => {
                        pending.remove(start, end);
                        model.retain(|at, _| *at < start || *at >= end);
                    }
                    Step::Shift(from, to, bytes) => {
                        pending.shift(from, to, bytes);
                        let moved: Vec<_> =
                            model.range(from..from + bytes).map(|(at, s)| (*at, *s)).collect();
                        model.retain(|at, _| *at < from || *at >= from + bytes);
                        model.retain(|at, _| *at < to || *at >= to + bytes);
                        model.extend(moved.iter().map(|(at, s)| (to + (at - from), *s)));
                    }
                }
                prop_assert_eq!(&model_of(&pending), &model);
                prop_assert_eq!(pending.bytes(), model.len() as u64);
            }
            let (start, end) = (look.0, look.0 + look.1);
            let within = pending.within(start, end);
            let within: u64 = within.iter().map(|piece| piece.bytes).sum();
            prop_assert_eq!(within, model.range(start..end).count() as u64);
            for piece in pending.of_source(start, end) {
                for i in 0..piece.bytes {
                    prop_assert_eq!(model.get(&(piece.at + i)), Some(&(piece.source + i)));
                }
            }
            let of_source: u64 =
                pending.of_source(start, end).iter().map(|piece| piece.bytes).sum();
            let wanted = model.values().filter(|s| (start..end).contains(*s)).count() as u64;
            prop_assert_eq!(of_source, wanted);
        }
    }
}
