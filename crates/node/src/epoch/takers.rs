//! Who takes checkpoints: the spares, and the store beside them.
//!
//! All get the same, piece by piece. Each may have to be told everything while the others go on
//! from what they have; whoever comes later gets the next checkpoint, and all of it. Nothing is
//! sent but through here, so that nobody is forgotten.

use std::collections::{BTreeMap, BTreeSet};

use hotspare_image::files::FileIdentity;
use hotspare_image::{NodeId, Position, Term};
use hotspare_replica::{Broken, Sender};

use super::Obstacle;
use crate::outgoing::Piece;
use crate::stored::Sink;

/// Room that a spare's queue must have before more is copied; more than the largest piece.
const ROOM_BYTES: usize = 4 << 20;
/// Checkpoints on their way to a spare that it has not acknowledged: it keeps them in memory.
const UNACKNOWLEDGED_MAX: usize = 8;

/// Takers of checkpoints.
#[derive(Default)]
pub struct Takers {
    /// Spares that take part. A broken stream is reported by the reader of its answers.
    pub spares: BTreeMap<NodeId, Sender>,
    /// Spares that take part from the next checkpoint on.
    joining: BTreeMap<NodeId, Sender>,
    /// Stores checkpoints.
    pub store: Option<Sink>,
    /// Spares to which the checkpoint under way must describe everything.
    incomplete: BTreeSet<NodeId>,
    /// So it must to the store.
    store_incomplete: bool,
}

impl Takers {
    /// A spare is there that starts from nothing. It takes part from the next checkpoint on: the
    /// one under way is of no use to it, and the others go on with that.
    pub fn add(&mut self, node: NodeId, spare: Sender) {
        self.remove(node);
        self.joining.insert(node, spare);
    }

    /// A spare is gone; the way to it.
    pub fn remove(&mut self, node: NodeId) -> Option<Sender> {
        self.incomplete.remove(&node);
        self.spares.remove(&node).or_else(|| self.joining.remove(&node))
    }

    /// All spares, also those that do not take part yet.
    pub fn all_spares(&self) -> impl Iterator<Item = &Sender> {
        self.spares.values().chain(self.joining.values())
    }

    /// Everybody must be told everything.
    pub fn want_full(&mut self) {
        self.store_incomplete = self.store.is_some();
        self.incomplete = self.spares.keys().copied().collect();
    }

    /// Whether somebody needs all of the checkpoint under way, or of the next.
    pub fn is_full(&self) -> bool {
        !self.incomplete.is_empty() || self.store_incomplete
    }

    /// Who has no room for more, of those that can be reached.
    pub fn without_room(&self) -> Option<Obstacle> {
        let has_room = |spare: &Sender| {
            let late = spare.unacknowledged() >= UNACKNOWLEDGED_MAX;
            (!late && spare.room_bytes() >= ROOM_BYTES) || spare.broken().is_some()
        };
        if !self.spares.values().all(has_room) {
            return Some(Obstacle::SlowSpare);
        }
        let store = self.store.as_ref().filter(|store| !store.has_room());
        store.map(|_| Obstacle::SlowStore)
    }

    /// A checkpoint begins, with those who have come meanwhile.
    pub fn begin(&mut self, position: Position, term: Term) {
        for (node, spare) in std::mem::take(&mut self.joining) {
            self.spares.insert(node, spare);
            self.incomplete.insert(node);
        }
        self.store_incomplete |= self.store.as_ref().is_some_and(Sink::takes_full);
        for (node, spare) in &self.spares {
            let _ = spare.begin(position, term, self.incomplete.contains(node));
        }
        if let Some(store) = &self.store {
            store.begin(position, term, self.store_incomplete);
        }
    }

    /// A piece of it, to whom it is for: first copies of directories go only to those who have
    /// nothing of them.
    pub fn send(&self, piece: &Piece) {
        let first_copy = matches!(piece, Piece::Copies(_));
        for (node, spare) in &self.spares {
            if !first_copy || self.incomplete.contains(node) {
                let _ = piece.send(spare);
            }
        }
        if let Some(store) = self.store.as_ref().filter(|_| !first_copy || self.store_incomplete) {
            store.piece(piece);
        }
    }

    /// Files that a host must have alike to go on with it.
    pub fn files(&self, files: &[FileIdentity]) {
        self.each_spare(|spare| spare.files(files));
        self.store.iter().for_each(|store| store.files(files));
    }

    /// It is whole; the spare in the path, and its last packet that is covered.
    pub fn end(&mut self, position: Position, inputs: Option<(NodeId, u64)>) {
        for (node, spare) in &self.spares {
            let own = inputs.filter(|(whose, _)| whose == node);
            let _ = spare.end(position, own.map(|(_, number)| number));
        }
        self.store.iter_mut().for_each(Sink::end);
        self.incomplete.clear();
        self.store_incomplete = false;
    }

    /// It is void, and nothing may be built on what was to be in it.
    pub fn abort(&mut self, position: Position) {
        self.each_spare(|spare| spare.abort(position));
        self.store.iter().for_each(Sink::abort);
        self.want_full();
    }

    fn each_spare(&self, send: impl Fn(&Sender) -> Result<(), Broken>) {
        for spare in self.spares.values() {
            let _ = send(spare);
        }
    }
}
