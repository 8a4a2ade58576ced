//! TCP sockets that rest: with thousands of connections nearly all of them do.
//!
//! A socket whose mark ([`hotspare_kernel::marks`]) was the same at two stops is taken out of the
//! way of the others: no row, no name, no class is made for it, and nothing is asked. As long as
//! its mark stays the same, and no other descriptor of the guest is of the same socket, it goes
//! into the checkpoint as it was captured. When that ends it *wakes*, and goes the way of all
//! others, with what is known of it.

use std::collections::{HashMap, HashSet};

use hotspare_image::objects::{Descriptor, FileId, FileOwner, Object, OpenFile};
use hotspare_kernel::HostPid;
use hotspare_kernel::marks::{SocketIdentity, SocketMark};

use super::fdinfo::Header;
use super::socket::Rest;

/// Of so many stops, a socket wakes at one to have its options read ([`super::socket_options`]).
const STOPS_PER_TURN: usize = 32;
/// But no more sockets of a process than these wake at a stop.
const DUE_AT_ONCE: usize = 64;

/// A socket that rests, and the one descriptor of it.
#[derive(Debug)]
pub struct Resting {
    /// What its descriptor is.
    pub identity: SocketIdentity,
    /// The mark it had at the last stops.
    pub state: Box<[u8]>,
    /// What fdinfo said.
    pub header: Header,
    /// Its name.
    pub file: FileId,
    /// Who gets its signals.
    pub owner: FileOwner,
    /// What was captured, and what is known beyond that.
    pub rest: Rest,
}

impl Resting {
    /// Whether it is as it was.
    pub fn has(&self, mark: &SocketMark<'_>) -> bool {
        self.identity == mark.identity && *self.state == *mark.state
    }

    /// Its image at this stop.
    pub fn open_file(&self) -> OpenFile {
        let object = Object::Tcp(self.rest.image_now());
        OpenFile { id: self.file, flags: self.header.flags, owner: self.owner, object }
    }

    /// Its descriptor, number `fd`.
    pub fn descriptor(&self, fd: i32) -> Descriptor {
        Descriptor { fd, file: self.file, close_on_exec: self.header.close_on_exec }
    }
}

/// Where a resting socket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bed {
    /// The process.
    pub host: HostPid,
    /// Its descriptor there.
    pub fd: i32,
    /// Its name.
    pub file: FileId,
}

/// All resting sockets of a guest, by inode number.
#[derive(Debug, Default)]
pub struct Dormitory {
    beds: HashMap<u64, Bed>,
    names: HashSet<FileId>,
}

impl Dormitory {
    /// Whether a socket can be told apart here; if so it rests now.
    pub fn lay(&mut self, inode: u64, bed: Bed) -> bool {
        let free = !self.beds.contains_key(&inode) && self.names.insert(bed.file);
        if free {
            self.beds.insert(inode, bed);
        }
        free
    }

    /// A socket wakes.
    pub fn wake(&mut self, inode: u64) {
        if let Some(bed) = self.beds.remove(&inode) {
            self.names.remove(&bed.file);
        }
    }

    /// Those of a process that is gone wake.
    pub fn retain(&mut self, mut alive: impl FnMut(HostPid) -> bool) {
        let Self { beds, names } = self;
        beds.retain(|_, bed| {
            let stays = alive(bed.host);
            if !stays {
                names.remove(&bed.file);
            }
            stays
        });
    }

    /// The socket with this inode number.
    pub fn find(&self, inode: u64) -> Option<Bed> {
        self.beds.get(&inode).copied()
    }

    /// Whether a resting socket has this name.
    pub fn has_name(&self, file: FileId) -> bool {
        self.names.contains(&file)
    }

    /// Whether none rests.
    pub fn is_empty(&self) -> bool {
        self.beds.is_empty()
    }
}

/// Whose turn it is to have options read: descriptors above the one that was last.
#[derive(Debug, Default)]
pub struct Turn {
    last: Option<i32>,
    left: usize,
    missed: bool,
}

impl Turn {
    /// A stop begins, at which so many rest.
    pub fn begin(&mut self, resting: usize) {
        if std::mem::replace(&mut self.missed, resting > 0) {
            // All have had their turn.
            self.last = None;
        }
        self.left = resting.div_ceil(STOPS_PER_TURN).min(DUE_AT_ONCE);
    }

    /// Whether it is the turn of the resting socket with this number; they come in order.
    pub fn is_of(&mut self, fd: i32) -> bool {
        if self.left == 0 || self.last.is_some_and(|last| fd <= last) {
            return false;
        }
        (self.last, self.missed) = (Some(fd), false);
        self.left -= 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_has_a_turn() {
        for (all, stops) in [(24, 26), (200, 31), (10_000, 159)] {
            let mut turn = Turn::default();
            let mut seen = HashMap::<i32, usize>::new();
            for _ in 0..stops {
                turn.begin(all as usize);
                let due: Vec<i32> = (0..all).filter(|fd| turn.is_of(*fd)).collect();
                assert!(due.len() <= DUE_AT_ONCE);
                due.into_iter().for_each(|fd| *seen.entry(fd).or_default() += 1);
            }
            assert_eq!(seen.len(), all as usize);
            assert!(seen.values().all(|times| (1..=2).contains(times)), "{seen:?}");
        }
    }

    #[test]
    fn a_number_or_a_name_rests_once() {
        let bed = |file| Bed { host: HostPid(1), fd: 3, file: FileId(file) };
        let mut all = Dormitory::default();
        assert!(all.lay(7, bed(1)));
        assert!(!all.lay(7, bed(2)));
        assert!(!all.lay(8, bed(1)));
        all.wake(7);
        assert!(all.lay(8, bed(1)) && all.find(7).is_none());
        all.retain(|_| false);
        assert!(all.is_empty() && !all.has_name(FileId(1)));
    }
}
