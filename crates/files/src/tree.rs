//! The names and inodes of a replicated directory, in memory.
//!
//! The tree decides what exists: lookups and listings are answered from it, so both hosts number
//! inodes alike and list a directory in the same order (a saved getdents(2) position stays true).
//! Content and attributes live in the backing directory.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hotspare_image::files::{FileName, FileTime, InodeNumber};
use nix::errno::Errno;
use xxhash_rust::xxh3::xxh3_64;

/// What an inode is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Regular,
    Directory,
    Symlink,
    Fifo,
    Socket,
}

/// Place of an entry in its directory's listing: from the hash of its name, so that it depends on
/// nothing but the name. Positions 1 and 2 are `.` and `..`.
pub(crate) fn listing_position(name: &FileName) -> u64 {
    (xxh3_64(name.as_bytes()) >> 1).max(3)
}

/// Entries of a directory in listing order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entries(BTreeMap<(u64, FileName), InodeNumber>);

impl Entries {
    pub fn get(&self, name: &FileName) -> Option<InodeNumber> {
        self.0.get(&(listing_position(name), name.clone())).copied()
    }

    pub fn insert(&mut self, name: FileName, inode: InodeNumber) -> Option<InodeNumber> {
        self.0.insert((listing_position(&name), name), inode)
    }

    pub fn remove(&mut self, name: &FileName) -> Option<InodeNumber> {
        self.0.remove(&(listing_position(name), name.clone()))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&FileName, InodeNumber)> {
        self.0.iter().map(|((_, name), inode)| (name, *inode))
    }

    /// Entries whose position is greater than `position`, with their positions.
    pub fn after(&self, position: u64) -> impl Iterator<Item = (u64, &FileName, InodeNumber)> {
        self.0
            .range((position.saturating_add(1), first_name())..)
            .map(|((position, name), inode)| (*position, name, *inode))
    }
}

/// The name that sorts before all others.
fn first_name() -> FileName {
    FileName::new(&[1]).unwrap_or_else(|| unreachable!("one byte is a name"))
}

/// A ctime that was carried over from the other host, valid while the backing inode's own ctime
/// stays what it was then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CarriedChangeTime {
    pub shown: FileTime,
    pub backing: FileTime,
}

/// An inode.
#[derive(Debug)]
pub(crate) struct Node {
    pub kind: Kind,
    /// Directory and name, for each of its names; empty once it is unlinked.
    pub names: Vec<(InodeNumber, FileName)>,
    /// Entries, if it is a directory.
    pub entries: Entries,
    /// Directories among the entries.
    pub subdirectories: u32,
    /// References the kernel holds on it (FUSE `nlookup`).
    pub lookups: AtomicU64,
    /// Keeps the backing inode alive once it has no name.
    pub nameless: Option<Arc<OwnedFd>>,
    /// ctime as it was on the host it came from.
    pub changed: Option<CarriedChangeTime>,
}

impl Node {
    pub fn new(kind: Kind) -> Node {
        Node {
            kind,
            names: Vec::new(),
            entries: Entries::default(),
            subdirectories: 0,
            lookups: AtomicU64::new(0),
            nameless: None,
            changed: None,
        }
    }

    pub fn known_to_kernel(&self) -> bool {
        self.lookups.load(Ordering::Acquire) > 0
    }
}

/// All inodes and their names.
#[derive(Debug)]
pub(crate) struct Tree {
    nodes: HashMap<InodeNumber, Node>,
    /// Number of the next new inode.
    pub next: u64,
    /// References the kernel still holds on inodes from before [`Tree::clear`].
    left_over: HashMap<InodeNumber, u64>,
}

impl Tree {
    pub fn new() -> Tree {
        let next = InodeNumber::ROOT.0 + 1;
        let mut tree = Tree { nodes: HashMap::new(), next, left_over: HashMap::new() };
        let root = Node::new(Kind::Directory);
        root.lookups.store(1, Ordering::Release);
        tree.nodes.insert(InodeNumber::ROOT, root);
        tree
    }

    pub fn allocate(&mut self) -> InodeNumber {
        let inode = InodeNumber(self.next);
        self.next += 1;
        inode
    }

    pub fn node(&self, inode: InodeNumber) -> Result<&Node, Errno> {
        self.nodes.get(&inode).ok_or(Errno::ESTALE)
    }

    pub fn node_mut(&mut self, inode: InodeNumber) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(&inode).ok_or(Errno::ESTALE)
    }

    pub fn directory(&self, inode: InodeNumber) -> Result<&Node, Errno> {
        let node = self.node(inode)?;
        if node.kind == Kind::Directory { Ok(node) } else { Err(Errno::ENOTDIR) }
    }

    pub fn child(&self, parent: InodeNumber, name: &FileName) -> Result<InodeNumber, Errno> {
        self.directory(parent)?.entries.get(name).ok_or(Errno::ENOENT)
    }

    pub fn inodes(&self) -> impl Iterator<Item = (InodeNumber, &Node)> {
        self.nodes.iter().map(|(inode, node)| (*inode, node))
    }

    /// Path relative to the root, components joined by `/`, empty for the root; `None` for an inode
    /// without a name.
    pub fn path(&self, inode: InodeNumber) -> Option<Vec<u8>> {
        let mut components = Vec::new();
        let mut at = inode;
        while at != InodeNumber::ROOT {
            let (parent, name) = self.nodes.get(&at)?.names.first()?;
            components.push(name.as_bytes());
            at = *parent;
        }
        components.reverse();
        Some(components.join(&b'/'))
    }

    /// Adds a new inode without a name.
    pub fn add(&mut self, inode: InodeNumber, kind: Kind) -> Result<&mut Node, Errno> {
        self.next = self.next.max(inode.0.saturating_add(1));
        match self.nodes.entry(inode) {
            Entry::Vacant(entry) => {
                let node = entry.insert(Node::new(kind));
                let lookups = self.left_over.remove(&inode).unwrap_or(0);
                node.lookups.store(lookups, Ordering::Release);
                Ok(node)
            }
            Entry::Occupied(_) => Err(Errno::EEXIST),
        }
    }

    /// Gives `inode` the name `name` in `parent`, which must be free.
    pub fn link(
        &mut self,
        parent: InodeNumber,
        name: FileName,
        inode: InodeNumber,
    ) -> Result<(), Errno> {
        let node = self.node_mut(inode)?;
        node.names.push((parent, name.clone()));
        let is_directory = node.kind == Kind::Directory;
        let directory = self.node_mut(parent)?;
        directory.entries.insert(name, inode);
        directory.subdirectories += u32::from(is_directory);
        Ok(())
    }

    /// Takes the name away from the inode that has it.
    pub fn unlink(&mut self, parent: InodeNumber, name: &FileName) -> Result<InodeNumber, Errno> {
        let inode = self.node_mut(parent)?.entries.remove(name).ok_or(Errno::ENOENT)?;
        let node = self.node_mut(inode)?;
        node.names.retain(|(of, called)| !(*of == parent && called == name));
        let is_directory = node.kind == Kind::Directory;
        self.node_mut(parent)?.subdirectories -= u32::from(is_directory);
        Ok(inode)
    }

    /// Drops an inode without names.
    pub fn forget(&mut self, inode: InodeNumber) {
        if let Some(node) = self.nodes.remove(&inode) {
            let held = node.lookups.load(Ordering::Acquire);
            if held > 0 {
                self.left_over.insert(inode, held);
            }
        }
    }

    /// Forgets everything but the root. The kernel's references are remembered: inodes may come
    /// back under the same numbers.
    pub fn clear(&mut self, next: u64) {
        let held = |node: &Node| node.lookups.load(Ordering::Acquire);
        let mut left_over = std::mem::take(&mut self.left_over);
        left_over.extend(
            self.nodes
                .iter()
                .map(|(inode, node)| (*inode, held(node)))
                .filter(|(_, held)| *held > 0),
        );
        let root = left_over.remove(&InodeNumber::ROOT).unwrap_or(1);
        *self = Tree { left_over, ..Tree::new() };
        self.next = self.next.max(next);
        if let Some(node) = self.nodes.get(&InodeNumber::ROOT) {
            node.lookups.store(root, Ordering::Release);
        }
    }

    /// The kernel gave back `count` references on an inode that is not in the tree any more.
    pub fn forget_left_over(&mut self, inode: InodeNumber, count: u64) {
        if let Some(held) = self.left_over.get_mut(&inode) {
            *held = held.saturating_sub(count);
            if *held == 0 {
                self.left_over.remove(&inode);
            }
        }
    }

    /// Whether the kernel holds references on an inode that is or was in the tree.
    pub fn known_to_kernel(&self, inode: InodeNumber) -> bool {
        self.left_over.contains_key(&inode)
            || self.nodes.get(&inode).is_some_and(Node::known_to_kernel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> FileName {
        FileName::new(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_moved_directory_takes_the_paths_below_it_along() {
        let mut tree = Tree::new();
        let (outer, inner) = (tree.allocate(), tree.allocate());
        tree.add(outer, Kind::Directory).unwrap();
        tree.link(InodeNumber::ROOT, name("a"), outer).unwrap();
        tree.add(inner, Kind::Regular).unwrap();
        tree.link(outer, name("f"), inner).unwrap();
        assert_eq!(tree.path(inner).unwrap(), b"a/f");
        tree.unlink(InodeNumber::ROOT, &name("a")).unwrap();
        assert_eq!(tree.path(inner), None);
        tree.link(InodeNumber::ROOT, name("b"), outer).unwrap();
        assert_eq!(tree.path(inner).unwrap(), b"b/f");
        assert_eq!(tree.node(InodeNumber::ROOT).unwrap().subdirectories, 1);
    }

    #[test]
    fn a_listing_continues_after_any_position() {
        let mut tree = Tree::new();
        for number in 0..100 {
            let inode = tree.allocate();
            tree.add(inode, Kind::Regular).unwrap();
            tree.link(InodeNumber::ROOT, name(&format!("f{number}")), inode).unwrap();
        }
        let entries = &tree.node(InodeNumber::ROOT).unwrap().entries;
        let all: Vec<u64> = entries.after(2).map(|(position, _, _)| position).collect();
        assert_eq!(all.len(), 100);
        for (index, position) in all.iter().enumerate() {
            assert_eq!(entries.after(*position).count(), 99 - index);
        }
    }
}
