//! The initial copy: everything in the directory, for a spare that joins while the guest runs.
//!
//! Names are those of one instant, which the log marks. Content is read afterwards, while the guest
//! goes on changing it: what it changes after the mark is in the log too, and applying it again
//! gives the same result (each byte, size and attribute ends as its last change left it). So the
//! copy followed by the logged changes after the mark equals the directory at the next cut.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use hotspare_image::files::{CopyMark, FileChange, FileName, InodeNumber, NewNode, NodeKind};
use hotspare_kernel::sparse::{next_data, read_up_to};
use nix::errno::Errno;

use crate::change_set::encode_in_chunks;
use crate::error::FilesError;
use crate::shared::Shared;
use crate::tree::{Kind, Tree};

/// Content is read in pieces of this size, bytes.
const PIECE_BYTES: u64 = 1 << 20;

#[derive(Debug)]
struct Original {
    inode: InodeNumber,
    kind: Kind,
    names: Vec<(InodeNumber, FileName)>,
}

/// Where in the copy we are.
#[derive(Debug)]
enum Phase {
    /// Making the inodes, next the one with this index.
    Nodes(usize),
    /// Content and attributes of everything but directories.
    Contents(usize),
    /// Attributes of directories, which the entries made in them would change.
    Directories(usize),
    End,
}

/// A file being copied.
#[derive(Debug)]
struct Reading {
    inode: InodeNumber,
    file: File,
    offset: u64,
}

/// Iterator over the changes that make an empty directory a copy of the replicated one. Each
/// carries at most 1 MiB of content.
#[derive(Debug)]
pub struct InitialCopy {
    shared: Arc<Shared>,
    mark: CopyMark,
    originals: Vec<Original>,
    phase: Phase,
    reading: Option<Reading>,
    ready: VecDeque<FileChange>,
}

impl InitialCopy {
    pub(crate) fn new(shared: Arc<Shared>, mark: CopyMark) -> InitialCopy {
        InitialCopy::begin(shared, mark, true)
    }

    /// `logs` where the log is to say which changes are part of the names.
    pub(crate) fn begin(shared: Arc<Shared>, mark: CopyMark, logs: bool) -> InitialCopy {
        let (originals, next_inode) = {
            // Names cannot change while the tree is locked, nor can their changes be logged.
            let tree = shared.store.tree();
            if logs {
                shared.log.mark(mark);
            }
            (parents_first(&tree), InodeNumber(tree.next))
        };
        let ready = VecDeque::from([FileChange::CopyBegin { mark, next_inode }]);
        InitialCopy { shared, mark, originals, phase: Phase::Nodes(0), reading: None, ready }
    }

    /// The copy as encoded chunks of about `chunk_bytes`, for [`crate::ReplicatedDir::copy_chunk`].
    pub fn chunks(self, chunk_bytes: usize) -> impl Iterator<Item = Result<Vec<u8>, FilesError>> {
        encode_in_chunks(self, chunk_bytes)
    }

    /// Makes the next changes ready.
    fn advance(&mut self) -> Result<(), FilesError> {
        if let Some(reading) = self.reading.take() {
            return self.read_on(reading);
        }
        match self.phase {
            Phase::Nodes(index) => match self.originals.get(index) {
                Some(_) => {
                    self.make_node(index);
                    self.phase = Phase::Nodes(index + 1);
                }
                None => self.phase = Phase::Contents(0),
            },
            Phase::Contents(index) => match self.originals.get(index) {
                Some(original) => {
                    let (inode, kind) = (original.inode, original.kind);
                    self.phase = Phase::Contents(index + 1);
                    if kind != Kind::Directory {
                        self.copy_rest(inode, kind)?;
                    }
                }
                None => self.phase = Phase::Directories(0),
            },
            Phase::Directories(index) => match self.originals.get(index) {
                Some(original) => {
                    let (inode, kind) = (original.inode, original.kind);
                    self.phase = Phase::Directories(index + 1);
                    if kind == Kind::Directory {
                        self.copy_rest(inode, kind)?;
                    }
                }
                None => {
                    self.ready.push_back(FileChange::CopyEnd { mark: self.mark });
                    self.phase = Phase::End;
                }
            },
            Phase::End => {}
        }
        Ok(())
    }

    /// Makes an inode with all its names. Owner and mode follow with the attributes.
    fn make_node(&mut self, index: usize) {
        let original = &self.originals[index];
        let inode = original.inode;
        if inode == InodeNumber::ROOT {
            return;
        }
        let (kind, mode) = match original.kind {
            Kind::Regular => (NodeKind::Regular, 0o600),
            Kind::Directory => (NodeKind::Directory, 0o700),
            Kind::Symlink => (NodeKind::Symlink(self.link_target(inode)), 0o777),
            Kind::Fifo => (NodeKind::Fifo, 0o600),
            Kind::Socket => (NodeKind::Socket, 0o600),
        };
        let node = NewNode { inode, kind, mode, uid: 0, gid: 0 };
        let mut names = original.names.iter().cloned();
        self.ready.push_back(match names.next() {
            Some((parent, name)) => FileChange::Create { parent, name, node },
            None => FileChange::CreateNameless { node },
        });
        self.ready.extend(names.map(|(parent, name)| FileChange::Link { inode, parent, name }));
    }

    /// Where a symbolic link points. One that is gone by now is removed by the log anyway.
    fn link_target(&self, inode: InodeNumber) -> Vec<u8> {
        let tree = self.shared.store.tree();
        let target = self
            .shared
            .store
            .node_fd(&tree, inode)
            .and_then(|fd| nix::fcntl::readlinkat(fd.as_fd(), ""));
        target.map_or(b"gone".to_vec(), |target| target.as_bytes().to_vec())
    }

    /// Copies attributes and starts to copy content. An inode that is gone by now is gone in the
    /// log as well.
    fn copy_rest(&mut self, inode: InodeNumber, kind: Kind) -> Result<(), FilesError> {
        let shared = self.shared.clone();
        let opened = {
            let tree = shared.store.tree();
            match kind {
                Kind::Regular => shared.store.open_content(&tree, inode).map(Some),
                Kind::Directory | Kind::Symlink | Kind::Fifo | Kind::Socket => Ok(None),
            }
        };
        match opened {
            Ok(None) => self.copy_attributes(inode),
            Ok(Some(file)) => {
                let size_bytes =
                    file.metadata().map_err(|error| self.failed("read", inode, error))?.len();
                self.ready.push_back(FileChange::Truncate { inode, size_bytes });
                self.reading = Some(Reading { inode, file, offset: 0 });
                Ok(())
            }
            Err(Errno::ESTALE | Errno::ENOENT) => Ok(()),
            Err(error) => Err(self.failed("open", inode, error)),
        }
    }

    fn read_on(&mut self, mut reading: Reading) -> Result<(), FilesError> {
        let inode = reading.inode;
        let Some((start, end)) = next_data(&reading.file, reading.offset)
            .map_err(|error| self.failed("read", inode, error))?
        else {
            return self.copy_attributes(inode);
        };
        let length = (end - start).min(PIECE_BYTES);
        let mut bytes = vec![0; length as usize];
        let count = read_up_to(&reading.file, &mut bytes, start)
            .map_err(|error| self.failed("read", inode, error))?;
        bytes.truncate(count);
        reading.offset = start + length;
        if count > 0 {
            self.ready.push_back(FileChange::Write { inode, offset: start, bytes });
        }
        self.reading = Some(reading);
        Ok(())
    }

    fn copy_attributes(&mut self, inode: InodeNumber) -> Result<(), FilesError> {
        let result = {
            let tree = self.shared.store.tree();
            copied_attributes(&self.shared, &tree, inode)
        };
        match result {
            Ok(changes) => {
                self.ready.extend(changes);
                Ok(())
            }
            Err(Errno::ESTALE | Errno::ENOENT) => Ok(()),
            Err(error) => Err(self.failed("read attributes of", inode, error)),
        }
    }

    fn failed(
        &self,
        doing: &'static str,
        inode: InodeNumber,
        error: impl Into<std::io::Error>,
    ) -> FilesError {
        FilesError::backing(doing, &self.shared.store.message_path(inode), error)
    }
}

impl Iterator for InitialCopy {
    type Item = Result<FileChange, FilesError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(change) = self.ready.pop_front() {
                return Some(Ok(change));
            }
            if matches!(self.phase, Phase::End) && self.reading.is_none() {
                return None;
            }
            if let Err(error) = self.advance() {
                self.phase = Phase::End;
                self.reading = None;
                return Some(Err(error));
            }
        }
    }
}

/// All inodes: directories, each after the one it is in, then all others (whose names may be in any
/// of them).
fn parents_first(tree: &Tree) -> Vec<Original> {
    let is_directory =
        |inode: &InodeNumber| tree.node(*inode).is_ok_and(|node| node.kind == Kind::Directory);
    let mut order = vec![InodeNumber::ROOT];
    let mut index = 0;
    while let Some(inode) = order.get(index) {
        index += 1;
        let Ok(node) = tree.node(*inode) else { continue };
        let children = node.entries.iter().map(|(_, child)| child);
        order.extend(children.filter(is_directory));
    }
    let seen: HashSet<InodeNumber> = order.iter().copied().collect();
    let mut others: Vec<InodeNumber> =
        tree.inodes().map(|(inode, _)| inode).filter(|inode| !seen.contains(inode)).collect();
    others.sort();
    order.extend(others);
    order
        .into_iter()
        .filter_map(|inode| {
            let node = tree.node(inode).ok()?;
            Some(Original { inode, kind: node.kind, names: node.names.clone() })
        })
        .collect()
}

/// The xattrs and attributes of an inode as changes.
fn copied_attributes(
    shared: &Shared,
    tree: &Tree,
    inode: InodeNumber,
) -> Result<Vec<FileChange>, Errno> {
    let fd = shared.store.node_fd(tree, inode)?;
    let names = match hotspare_kernel::list_xattrs(&fd) {
        Ok(names) => names,
        Err(Errno::EOPNOTSUPP) => Vec::new(),
        Err(error) => return Err(error),
    };
    let mut changes = Vec::new();
    for name in names.split_inclusive(|byte| *byte == 0) {
        let Ok(name) = std::ffi::CStr::from_bytes_with_nul(name) else { continue };
        if name.to_bytes().starts_with(b"system.") {
            continue;
        }
        match hotspare_kernel::get_xattr(&fd, name) {
            Ok(value) => {
                changes.push(FileChange::SetXattr { inode, name: name.to_bytes().to_vec(), value });
            }
            Err(Errno::ENODATA) => {}
            Err(error) => return Err(error),
        }
    }
    let (_, attributes) = shared.store.attributes(tree, inode)?;
    changes.push(FileChange::Attributes { inode, attributes });
    Ok(changes)
}
